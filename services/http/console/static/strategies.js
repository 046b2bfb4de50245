// The last minutes under static, dynamic and continuous batching, side by side.

import { colour } from "./colours.js";
import { duration } from "./figures.js";
import { ask } from "./server.js";

const SHADES = 4;
const MAX_ROW = 14;
const HEIGHT = 160;
const AXIS = 16;

export class Strategies {
  constructor(form, { status, result, table, charts }) {
    Object.assign(this, { form, status, result, table, charts, found: null, canvases: [] });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    addEventListener("resize", () => this.draw());
  }

  async submit() {
    const value = (name) => Number(this.form.querySelector(`#${name}`).value);
    const button = this.form.querySelector("button");
    button.disabled = true;
    this.status.textContent = "Reading the record and simulating …";
    try {
      this.found = await ask("/console/api/strategies", { seconds: 60 * value("minutes"), rows: value("strategy-rows") });
      this.show();
    } catch (error) {
      this.status.textContent = error.message;
    } finally {
      button.disabled = false;
    }
  }

  show() {
    const { requests, arrivalSeconds, rows, runs, isCut } = this.found;
    const cut = isCut ? " Older requests were left out, so that the answer comes in time." : "";
    this.status.textContent = `${requests} requests that arrived within ${duration(arrivalSeconds)}, with ${rows} rows per worker.${cut}`;
    this.table.replaceChildren(...runs.map(line));
    this.canvases = runs.map((run) => {
      const figure = document.createElement("figure");
      const caption = document.createElement("figcaption");
      const canvas = document.createElement("canvas");
      caption.textContent = run.name;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `Rows of the first worker over time under ${run.name} batching; the table has the figures`);
      figure.append(caption, canvas);
      return { figure, canvas, run };
    });
    this.charts.replaceChildren(...this.canvases.map((each) => each.figure));
    this.result.hidden = false;
    this.draw();
  }

  /** Draws the charts with one time axis for all, so that lengths can be compared. */
  draw() {
    const last = Math.max(1e-6, ...this.canvases.flatMap(({ run }) => run.stays.map((stay) => stay[4])));
    for (const { canvas, run } of this.canvases) drawRun(canvas, run, this.found.rows, last);
  }
}

function drawRun(canvas, run, rows, last) {
  const rowHeight = Math.max(2, Math.min(MAX_ROW, Math.floor(HEIGHT / rows)));
  const scale = Math.min(2, devicePixelRatio || 1);
  const width = canvas.parentElement.clientWidth;
  const bottom = rowHeight * rows;
  canvas.width = width * scale;
  canvas.height = (bottom + AXIS) * scale;
  canvas.style.height = `${bottom + AXIS}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.fillStyle = colour("idle");
  context.fillRect(0, 0, width, bottom);
  const x = (time) => (time / last) * width;
  const gap = rowHeight > 4 ? 1 : 0;
  for (const [row, request, begin, decode, end] of run.stays) {
    const y = row * rowHeight;
    const paint = (name, from, to) => {
      context.fillStyle = colour(name);
      context.fillRect(x(from), y, Math.max(0.5, x(to) - x(from)), rowHeight - gap);
    };
    paint(`decode-${request % SHADES}`, begin, end);
    paint("prefill", begin, decode);
    paint("leave", end - (1.5 * last) / width, end);
  }
  context.fillStyle = colour("quiet");
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "bottom";
  for (let mark = 0; mark <= 4; mark += 1) {
    const text = mark ? duration((last * mark) / 4) : "0";
    context.textAlign = mark === 0 ? "left" : mark === 4 ? "right" : "center";
    context.fillText(text, (width * mark) / 4, bottom + AXIS);
  }
}

function line(run) {
  const row = document.createElement("tr");
  const name = document.createElement("th");
  name.scope = "row";
  name.textContent = run.name;
  row.append(name);
  const both = (pair) => (pair ? pair.map(duration).join(" / ") : "–");
  const values = [
    duration(run.seconds), Math.round(run.tokensPerSecond).toLocaleString("en"), both(run.ttft), both(run.itl), both(run.latency),
    `${Math.round(run.rowShare * 100)} %`,
  ];
  for (const value of values) row.insertCell().textContent = value;
  return row;
}
