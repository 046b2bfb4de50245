// The batch as a moving Gantt chart over time: one pixel per row and step in a ring, drawn as wide as the step took. So a
// frame costs the same for eight rows and for a thousand.

import { colour, pixel } from "./colours.js";
import { MAX_STEPS, cell } from "./model.js";

const SHADES = 4;
const HEIGHT = 340;
const MAX_ROW = 20;
const LABEL_ROW = 13;
const LEAST_LABELLED = 600; // pixels of a chart from which on it has names
const LABEL_WIDTH = 0.18; // of the chart, for the names of the requests beside their rows
const CATCH_UP = 6; // per second: how fast the chart moves to the newest step
const AXIS = 26; // pixels below the rows: incidents and times
const TICKS_S = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20];
const TICK_WIDTH = 80;
const IDLE_S = 2; // after this time without a step, the right edge is not "now"
const REACH = 3; // pixels beside a step that still belong to it

export class Gantt {
  /** `changed` gets the text of the cursor's step; `chosen` gets the number of a request. */
  constructor(canvas, model, { readout, chosen }) {
    this.canvas = canvas;
    this.model = model;
    this.readout = readout;
    this.chosen = chosen;
    this.worker = null;
    this.seconds = 10; // time that the chart shows
    this.followed = new Set();
    this.ring = document.createElement("canvas");
    this.ring.width = MAX_STEPS;
    this.cursor = null;
    this.pointer = null;
    this.reset();
    this.listen();
  }

  /** Draws everything anew, for another worker or other colours. */
  reset() {
    this.drawn = -1;
    this.shown = -1;
    this.rows = 0;
    this.palette = null;
  }

  show(worker) {
    this.worker = worker;
    this.cursor = null;
    this.reset();
  }

  get steps() {
    return this.worker === null ? undefined : this.model.workers.get(this.worker);
  }

  /** Draws a frame; `seconds` is the time since the one before. */
  frame(seconds) {
    const steps = this.steps;
    if (!steps || !steps.count) {
      this.blank();
      return;
    }
    if (steps.count < this.drawn) this.reset();
    this.catchUp(steps);
    if (this.shown < 0 || this.behind > this.seconds / 2) this.shown = this.newestTime;
    else this.shown += this.behind * Math.min(1, CATCH_UP * seconds);
    this.paint(steps);
    this.report();
  }

  /** The time at the right edge when the chart has caught up: the end of the newest step, also while the worker is idle. */
  get newestTime() {
    const step = this.steps.get(this.steps.count - 1);
    return step.start + step.seconds;
  }

  /** How far the chart is behind, in seconds. */
  get behind() {
    return this.newestTime - this.shown;
  }

  blank() {
    this.resize(8);
    const context = this.canvas.getContext("2d");
    context.fillStyle = colour("idle");
    context.fillRect(0, 0, this.width, this.height - AXIS);
    context.fillStyle = colour("quiet");
    context.font = "13px system-ui, sans-serif";
    context.fillText("No step yet. Send a request.", 10, 24, this.width - 20);
  }

  // ---------------------------------------------------------------- pixels

  catchUp(steps) {
    const own = this.model.load?.workers.find((each) => each.id === this.worker)?.rows ?? 1;
    const rows = Math.max(Math.min(8, own), steps.rows);
    if (rows > this.rows) {
      this.rows = rows > 64 ? Math.ceil(rows / 64) * 64 : rows;
      this.ring.height = this.rows;
      this.drawn = -1;
    }
    this.palette ??= makePalette();
    const context = this.ring.getContext("2d");
    if (this.drawn < steps.first) this.drawn = steps.first;
    for (; this.drawn < steps.count; this.drawn += 1) {
      const step = steps.get(this.drawn);
      context.putImageData(this.column(step), this.drawn % MAX_STEPS, 0);
      this.markLast(context, steps.get(this.drawn - 1), step);
    }
  }

  column(step) {
    const image = new ImageData(1, this.rows);
    const pixels = new Uint32Array(image.data.buffer);
    pixels.fill(this.palette.idle);
    const [rows, numbers] = step.decode;
    for (let at = 0; at < rows.length; at += 1) pixels[rows[at]] = this.palette.decode[numbers[at] % SHADES];
    for (const row of step.waiting[0]) pixels[row] = this.palette.waiting;
    for (const row of step.prefill[0]) pixels[row] = this.palette.prefill;
    return image;
  }

  /** Marks the last step of the requests that have left since the step before. */
  markLast(context, before, step) {
    if (!before) return;
    if (before.decode === step.decode && !step.prefill[0].length && !before.prefill[0].length) return;
    const now = owners(step, this.rows), then = owners(before, this.rows);
    context.fillStyle = colour("leave");
    for (let row = 0; row < this.rows; row += 1) {
      if (then[row] >= 0 && then[row] !== now[row]) context.fillRect((this.drawn - 1) % MAX_STEPS, row, 1, 1);
    }
  }

  // ---------------------------------------------------------------- a frame

  resize(rows) {
    const wanted = Math.max(1, Math.min(MAX_ROW, HEIGHT / rows));
    const rowHeight = wanted >= 2 ? Math.floor(wanted) : wanted;
    const width = this.canvas.parentElement.clientWidth;
    const height = Math.round(rowHeight * rows) + AXIS;
    const scale = rows > 200 ? 1 : Math.min(2, devicePixelRatio || 1);
    if (this.width !== width || this.height !== height || this.scale !== scale) {
      [this.width, this.height, this.scale] = [width, height, scale];
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = `${height}px`;
    }
    this.rowHeight = rowHeight;
    this.isLabelled = rowHeight >= LABEL_ROW && width >= LEAST_LABELLED;
    this.plotWidth = !this.isLabelled ? width : Math.round(width * (1 - LABEL_WIDTH));
    this.canvas.getContext("2d").setTransform(scale, 0, 0, scale, 0, 0);
  }

  /** Returns the x of a time. */
  x(time) {
    return this.plotWidth - ((this.shown - time) * this.plotWidth) / this.seconds;
  }

  paint(steps) {
    this.resize(this.rows);
    const context = this.canvas.getContext("2d");
    const bottom = this.rows * this.rowHeight;
    context.imageSmoothingEnabled = false;
    context.clearRect(0, 0, this.width, this.height);
    context.fillStyle = colour("idle");
    // The time before the first step that this page knows is left blank, not shown as idle.
    const known = Math.max(0, this.x(steps.get(steps.first).start));
    context.fillRect(known, 0, this.plotWidth - known, bottom);
    const first = Math.max(steps.first, steps.at(this.shown - this.seconds));
    const last = steps.at(this.shown);
    let painted = -Infinity;
    for (let index = first; index <= last; index += 1) {
      const step = steps.get(index);
      const [left, right] = [Math.max(0, this.x(step.start)), Math.min(this.plotWidth, this.x(step.start + step.seconds))];
      if (right <= painted + 0.5) continue; // as narrow as others in this pixel
      context.drawImage(this.ring, index % MAX_STEPS, 0, 1, this.rows, left, 0, Math.max(1, right - left), bottom);
      painted = right;
    }
    this.paintGrid(context, steps, first, last, bottom);
    context.clearRect(this.plotWidth, 0, this.width - this.plotWidth, this.height);
    this.paintAxis(context, bottom);
    this.paintLabels(context, steps, steps.count - 1);
    this.paintIncidents(context, steps, bottom);
    this.paintCursor(context, steps);
  }

  paintGrid(context, steps, first, last, bottom) {
    if (this.rowHeight < 6) return;
    context.fillStyle = colour("grid");
    for (let row = 1; row < this.rows; row += 1) context.fillRect(0, row * this.rowHeight, this.plotWidth, 1);
    let before = -Infinity;
    for (let index = first; index <= last; index += 1) {
      const x = this.x(steps.get(index).start);
      if (x - before >= 6) context.fillRect(x, 0, 1, bottom);
      before = x;
    }
  }

  /** Draws the times below the rows, counted back from the right edge. */
  paintAxis(context, bottom) {
    const tick = TICKS_S.find((each) => (each / this.seconds) * this.plotWidth >= TICK_WIDTH) ?? TICKS_S.at(-1);
    context.fillStyle = colour("quiet");
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "bottom";
    const age = (this.model.load?.time ?? this.shown) - this.shown;
    const edge = age < IDLE_S ? "now" : `${Math.round(age)} s ago`;
    for (let back = 0; back < this.seconds; back += tick) {
      const x = this.plotWidth - (back / this.seconds) * this.plotWidth;
      context.fillRect(x - (back ? 0 : 1), bottom, 1, 4);
      context.textAlign = back ? "center" : "right";
      if (x > 24) context.fillText(back ? `−${Number(back.toFixed(2))} s` : edge, x, this.height);
    }
    context.textAlign = "left";
  }

  paintLabels(context, steps, newest) {
    const step = steps.get(newest);
    if (!step) return;
    const numbers = owners(step, this.rows);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (let row = 0; row < this.rows; row += 1) {
      const isFollowed = this.followed.has(this.model.requests.get(numbers[row])?.id);
      const y = row * this.rowHeight;
      if (isFollowed) {
        context.strokeStyle = colour("text");
        context.lineWidth = 2;
        context.strokeRect(1, y, this.plotWidth - 2, Math.max(3, this.rowHeight));
      }
      if (numbers[row] < 0 || !this.isLabelled) continue;
      context.fillStyle = colour("text");
      context.fillText(this.model.name(numbers[row]), this.plotWidth + 6, y + this.rowHeight / 2 + 1, this.width - this.plotWidth - 8);
    }
  }

  paintIncidents(context, steps, bottom) {
    context.fillStyle = colour("alarm");
    const earliest = steps.get(steps.first).start;
    for (const incident of this.model.incidents) {
      if (incident.time < earliest) continue;
      const x = this.x(incident.time);
      if (x < 0 || x > this.plotWidth) continue;
      if (incident.kind !== "preempted") context.fillRect(x, 0, 2, bottom);
      context.beginPath();
      context.moveTo(x - 5, bottom + 12);
      context.lineTo(x + 6, bottom + 12);
      context.lineTo(x + 0.5, bottom + 2);
      context.fill();
    }
  }

  paintCursor(context, steps) {
    const place = this.cursor ?? this.pointer;
    const step = place && steps.get(place.step);
    if (!step) return;
    const x = this.x(step.start);
    const width = (step.seconds * this.plotWidth) / this.seconds;
    context.strokeStyle = colour("text");
    context.lineWidth = 1;
    context.strokeRect(x - 0.5, 0.5, Math.max(2, width), this.rows * this.rowHeight - 1);
    context.lineWidth = 2;
    context.strokeRect(x - 1, place.row * this.rowHeight - 1, Math.max(4, width + 1), Math.max(4, this.rowHeight + 1));
  }

  // ---------------------------------------------------------------- pointer and keys

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointermove", (event) => {
      this.pointer = this.place(event);
    });
    canvas.addEventListener("pointerleave", () => {
      this.pointer = null;
    });
    canvas.addEventListener("click", (event) => this.open(this.place(event)));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  place(event) {
    if (!this.steps?.count) return null;
    const box = this.canvas.getBoundingClientRect();
    const time = this.shown - ((box.left + this.plotWidth - event.clientX) * this.seconds) / this.plotWidth;
    const row = Math.floor((event.clientY - box.top) / this.rowHeight);
    const step = this.stepAt(time);
    return row >= 0 && row < this.rows && step >= 0 ? { step, row } : null;
  }

  /** Returns the index of the step at a time, or just beside it; -1 if the worker was idle. */
  stepAt(time) {
    const reach = (REACH * this.seconds) / this.plotWidth;
    const at = this.steps.at(time);
    const before = this.steps.get(at);
    if (before && time <= before.start + before.seconds + reach) return at;
    const after = this.steps.get(at < 0 ? this.steps.first : at + 1);
    return after && after.start - time <= reach ? at + 1 : -1;
  }

  key(event) {
    const steps = this.steps;
    if (!steps?.count) return;
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === "Escape") this.cursor = null;
    else if (event.key === "Enter") this.open(this.cursor);
    else if (moves[event.key]) {
      const [right, down] = moves[event.key];
      const at = this.cursor ?? this.newest(steps);
      this.cursor = {
        step: Math.min(steps.count - 1, Math.max(steps.first, at.step + right)),
        row: Math.min(this.rows - 1, Math.max(0, at.row + down)),
      };
    } else return;
    event.preventDefault();
  }

  /** Returns the first occupied row of the newest step that has one. */
  newest(steps) {
    for (let step = steps.count - 1; step >= steps.first; step -= 1) {
      const row = owners(steps.get(step), this.rows).findIndex((number) => number >= 0);
      if (row >= 0) return { step, row };
    }
    return { step: steps.count - 1, row: 0 };
  }

  open(place) {
    const found = place && cell(this.steps.get(place.step), place.row);
    if (found) this.chosen(found[1]);
  }

  report() {
    const place = this.cursor ?? this.pointer;
    const step = place && this.steps.get(place.step);
    if (!step) return;
    const tokens = step.prefill[2].reduce((sum, each) => sum + each, 0);
    const found = cell(step, place.row);
    const here = found ? `row ${place.row}: ${found[0]} of ${this.model.name(found[1])}` : `row ${place.row}: idle`;
    this.readout(
      `Step ${step.number}: ${step.decode[0].length} decode, ${step.prefill[0].length} prefill (${tokens} tokens), ` +
        `${step.waiting[0].length} held out, ${(step.seconds * 1000).toFixed(2)} ms; ${here}`,
    );
  }
}

/** Returns by row the number of its request, or -1. */
export function owners(step, rows) {
  const found = new Float64Array(rows).fill(-1);
  for (const [places, numbers] of [step.decode, step.waiting, step.prefill]) {
    for (let at = 0; at < places.length; at += 1) found[places[at]] = numbers[at];
  }
  return found;
}

function makePalette() {
  return {
    idle: pixel(colour("idle")),
    prefill: pixel(colour("prefill")),
    waiting: pixel(colour("waiting")),
    decode: [...Array(SHADES).keys()].map((shade) => pixel(colour(`decode-${shade}`))),
  };
}
