// Sends requests and shows their answers; the chart marks the rows of these requests.

import { events, send } from "./server.js";

const MAX_SHOWN = 64;

export class Playground {
  constructor(form, { stop, status, answers, followed }) {
    this.form = form;
    this.stop = stop;
    this.status = status;
    this.answers = answers;
    this.followed = followed;
    this.running = new Set();
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    stop.addEventListener("click", () => this.running.forEach((each) => each.abort()));
  }

  submit() {
    const value = (name) => this.form.querySelector(`#${name}`).value;
    this.run({
      prompt: value("prompt"),
      n: Number(value("copies")),
      max_tokens: Number(value("max-tokens")),
      temperature: Number(value("temperature")),
      stream: true,
      request_id: `playground-${crypto.getRandomValues(new Uint32Array(1))[0].toString(16)}`,
    });
  }

  async run(body) {
    const article = document.createElement("article");
    const title = document.createElement("strong");
    const texts = [...Array(body.n)].map(() => document.createElement("p"));
    title.textContent = body.request_id;
    article.append(title, ...texts);
    this.answers.prepend(article);
    while (this.answers.children.length > MAX_SHOWN) this.answers.lastChild.remove();
    const aborter = new AbortController();
    this.running.add(aborter);
    this.followed.add(body.request_id);
    this.count();
    const began = performance.now();
    let first = 0;
    try {
      const response = await send("/v1/completions", body, aborter.signal);
      for await (const chunk of events(response)) {
        first ||= performance.now() - began;
        for (const choice of chunk.choices ?? []) texts[choice.index].textContent += choice.text;
      }
      title.textContent += `: first text after ${first.toFixed(0)} ms, complete after ${(performance.now() - began).toFixed(0)} ms`;
    } catch (error) {
      title.textContent += error.name === "AbortError" ? ": stopped" : `: ${error.message}`;
    } finally {
      this.running.delete(aborter);
      this.followed.delete(body.request_id);
      this.count();
    }
  }

  count() {
    this.stop.disabled = !this.running.size;
    this.status.textContent = this.running.size ? `${this.running.size} in progress` : "";
  }
}
