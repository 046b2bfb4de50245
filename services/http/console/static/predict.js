// What other settings would do to the requests of the last minutes, next to what was measured.

import { duration } from "./figures.js";
import { ask } from "./server.js";

const whole = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const quantile = (name, index) => (run) => run[name]?.[index];

/** Title, value of a run (undefined: none), and how to write it. */
const LINES = [
  ["TTFT, median", quantile("ttft", 0), duration],
  ["TTFT, p99", quantile("ttft", 1), duration],
  ["ITL, median", quantile("itl", 0), duration],
  ["ITL, p99", quantile("itl", 1), duration],
  ["Latency, median", quantile("latency", 0), duration],
  ["Goodput, requests/s", (run) => (run.targeted ? run.good / run.seconds : undefined), whole],
  ["Completed, requests/s", (run) => run.completed / run.seconds, whole],
  ["Output tokens/s", (run) => run.tokensPerSecond, whole],
  ["Rows per step", (run) => run.rowsPerStep, whole],
];

export class Prediction {
  constructor(form, { status, result, table, notes }) {
    Object.assign(this, { form, status, result, table, notes, found: null });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
  }

  /** Returns the question of the form; fields that are empty stay as they are. */
  question() {
    const value = (name) => this.form.elements[name].value;
    const asked = { seconds: 60 * Number(value("minutes")), settings: {} };
    for (const name of ["policy", "max_num_seqs", "max_num_batched_tokens"]) if (value(name)) asked.settings[name] = value(name);
    for (const name of ["workers", "memoryPercent"]) if (value(name)) asked[name] = Number(value(name));
    return asked;
  }

  async submit() {
    const button = this.form.querySelector("button");
    button.disabled = true;
    this.status.textContent = "Reading the record and simulating; this takes up to a minute …";
    try {
      this.found = await ask("/console/api/predict", this.question());
      this.show();
    } catch (error) {
      this.result.hidden = true;
      this.status.textContent = error.message;
    } finally {
      button.disabled = false;
    }
  }

  show() {
    const { requests, workers, notes, runs } = this.found;
    const fleet = workers[0] === workers[1] ? "" : `, on ${workers[1]} workers instead of ${workers[0]}`;
    this.status.textContent = `${requests} requests${fleet}.`;
    this.table.replaceChildren(...LINES.map((line) => row(line, runs)));
    const hints = runs.measured.targeted ? notes : [...notes, "no request had a target, so there is no goodput"];
    this.notes.replaceChildren(...hints.map((note) => element("li", note)));
    this.result.hidden = false;
  }
}

function row([title, value, write], runs) {
  const line = document.createElement("tr");
  const name = element("th", title);
  name.scope = "row";
  line.append(name);
  const [measured, present, predicted] = [runs.measured, runs.present, runs.predicted].map(value);
  for (const each of [measured, present, predicted]) line.insertCell().textContent = each === undefined ? "–" : write(each);
  const change = present && predicted !== undefined ? Math.round(100 * (predicted / present - 1)) : undefined;
  line.insertCell().textContent = change === undefined ? "–" : `${change > 0 ? "+" : ""}${change} %`;
  return line;
}

function element(name, text) {
  const found = document.createElement(name);
  found.textContent = text;
  return found;
}
