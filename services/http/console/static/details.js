// The dialog about one request: what is known of it, its trace, and why it took as long as it did.

import { ask } from "./server.js";

export class Details {
  constructor(dialog, model) {
    this.dialog = dialog;
    this.model = model;
    this.part = (name) => dialog.querySelector(`#${name}`);
    this.part("close").addEventListener("click", () => dialog.close());
  }

  /** Shows the request with a number. */
  async show(number) {
    const request = this.model.requests.get(number);
    if (!request) return;
    this.part("details-title").textContent = `Request ${request.id}`;
    const facts = [["tenant", request.tenant || "(none)"], ["prompt tokens", request.prompt]];
    if (request.max) facts.push(["most tokens", request.max]);
    this.part("facts").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
    this.part("trace").replaceChildren(...this.trace(request.trace));
    const text = this.part("explanation");
    text.textContent = "Reading the scheduler's record …";
    if (!this.dialog.open) this.dialog.showModal();
    this.asked = number;
    let answer;
    try {
      answer = (await ask("/console/api/explain", { request: request.id })).text;
    } catch (error) {
      answer = `No explanation: ${error.message}`;
    }
    if (this.asked === number) text.textContent = answer;
  }

  trace(id) {
    if (!id) return ["It is not traced."];
    const template = this.model.traceUrl;
    if (!/^https?:\/\//.test(template)) return [`Trace ${id} (the setting console_trace_url makes this a link)`];
    const link = element("a", `Trace ${id}`);
    link.href = template.replaceAll("{trace_id}", id);
    link.target = "_blank";
    link.rel = "noopener noreferrer";
    return [link];
  }
}

function element(name, text) {
  const found = document.createElement(name);
  found.textContent = text;
  return found;
}
