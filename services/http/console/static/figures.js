// Small charts of the last minutes, each with its newest value as text, a legend, units, and the value under the pointer.

import { colour } from "./colours.js";

const SECONDS = 180;
const LEAST_SECONDS = 30;
const STALE_S = 5; // a value that is older is grey
const TOP = 13; // pixels for the largest value
const BOTTOM = 13; // pixels for the times

const per = (count, rates) => (rates.seconds > 0 ? count / rates.seconds : 0);
const sum = (load, name) => load.workers.reduce((total, each) => total + each[name], 0);
const share = (part, whole) => (whole > 0 ? part / whole : 0);
const percent = (value) => `${Math.round(value * 100)} %`;
export const duration = (value) => (value < 1 ? `${(value * 1000).toPrecision(3)} ms` : `${value.toPrecision(3)} s`);
const number = (value) => (value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));
const each = (unit) => (value) => `${number(value)} ${unit}`;
const whole = (value) => value.toLocaleString("en");

/** Title, lines with a name and a function of a load (undefined: nothing to show), how to write a value, and a note. */
const FIGURES = [
  { title: "TTFT", lines: [["median", (load) => load.rates.ttft?.[0]], ["p99", (load) => load.rates.ttft?.[1]]], write: duration, instead: unserved },
  { title: "ITL", lines: [["median", (load) => load.rates.itl?.[0]], ["p99", (load) => load.rates.itl?.[1]]], write: duration },
  { title: "Output", lines: [["tokens", (load) => per(load.rates.outputTokens, load.rates)]], write: each("tokens/s") },
  {
    title: "Prompts",
    lines: [
      ["computed", (load) => per(load.rates.promptTokens, load.rates)],
      ["cached", (load) => per(load.rates.cachedTokens, load.rates)],
    ],
    write: each("tokens/s"),
    note: cachedShare,
  },
  {
    title: "Requests",
    lines: [["goodput", (load) => per(load.rates.good, load.rates)], ["completed", (load) => per(load.rates.completed, load.rates)]],
    write: each("/s"),
    note: untargeted,
  },
  { title: "Requests now", lines: [["running", (load) => load.running], ["waiting", (load) => load.waiting]], write: whole },
  { title: "Rows", lines: [["occupied", (load) => share(load.running, sum(load, "rows"))]], write: percent, most: 1 },
  {
    title: "KV memory",
    lines: [
      ["held by requests", (load) => share(sum(load, "blocks") - sum(load, "free") - sum(load, "cached"), sum(load, "blocks"))],
      ["with reusable cache", (load) => share(sum(load, "blocks") - sum(load, "free"), sum(load, "blocks"))],
    ],
    write: percent,
    most: 1,
  },
];

/** Returns what stands for the TTFT while no first token has come and requests wait; undefined: nothing does. */
function unserved(load) {
  return load.waiting && load.limit.oldest >= 1 ? `over ${duration(load.limit.oldest)} (oldest waiting)` : undefined;
}

/** Says that goodput has no meaning, if no request had a target. */
function untargeted(loads) {
  const count = (name) => loads.reduce((total, load) => total + load.rates[name], 0);
  return count("completed") && !count("targeted") ? "no targets are set, so every completed request counts as good" : "";
}

/** Says which share of the prompt tokens was cached. */
function cachedShare(loads) {
  const count = (name) => loads.reduce((total, load) => total + load.rates[name], 0);
  const cached = count("cachedTokens");
  return cached ? `${percent(share(cached, cached + count("promptTokens")))} of the prompt tokens were cached` : "";
}

export class Figures {
  constructor(parent, model) {
    this.model = model;
    this.charts = FIGURES.map((figure) => new Chart(parent, figure, model));
  }

  /** Draws the newest loads; call it when one has come. */
  update() {
    const loads = this.model.loads.filter((load) => load.time > (this.model.load?.time ?? 0) - SECONDS);
    for (const chart of this.charts) chart.show(loads);
  }
}

class Chart {
  constructor(parent, figure, model) {
    Object.assign(this, figure);
    this.model = model;
    this.pointer = null;
    const box = document.createElement("figure");
    const caption = document.createElement("figcaption");
    this.value = element("b", "–");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${this.title} over the last ${SECONDS / 60} minutes`);
    this.remark = element("p", "", "quiet");
    this.remark.hidden = true;
    caption.append(element("span", this.title), this.value, this.legend());
    box.append(caption, this.canvas, this.remark);
    parent.append(box);
    this.canvas.addEventListener("pointermove", (event) => this.point(event.clientX - this.canvas.getBoundingClientRect().left));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
  }

  legend() {
    const legend = element("span", "", "lines");
    this.lines.forEach(([name], index) => {
      const key = element("span", name);
      key.className = index ? "line-b" : "line-a";
      legend.append(key);
    });
    return legend;
  }

  point(x) {
    this.pointer = x;
    if (this.loads?.length) this.show(this.loads);
  }

  show(loads) {
    this.loads = loads;
    const values = this.lines.map(([, line]) => loads.map(line));
    const at = this.pointer === null ? -1 : this.nearest(loads);
    const remark = this.note?.(loads) ?? "";
    this.remark.textContent = remark;
    this.remark.hidden = !remark;
    if (at >= 0) this.say(loads, values, at, `${Math.round(loads.at(-1).time - loads[at].time)} s ago`);
    else this.say(loads, values, loads.findLastIndex((_, index) => values.some((line) => line[index] !== undefined)));
    this.draw(loads, values, at);
  }

  /** Writes the values of a load; those of an old one are grey, with their age. */
  say(loads, values, at, when = "") {
    const age = at >= 0 ? loads.at(-1).time - loads[at].time : 0;
    const isStale = !when && age > STALE_S;
    const instead = !when && (at < 0 || isStale) && loads.length ? this.instead?.(loads.at(-1)) : undefined;
    const text = at < 0 ? "–" : values.map((line) => (line[at] === undefined ? "–" : this.write(line[at]))).join(" / ");
    const suffix = when || (isStale ? `${Math.round(age)} s ago` : "");
    this.value.textContent = instead ?? (suffix && at >= 0 ? `${text}, ${suffix}` : text);
    this.value.className = instead ? "alarm" : isStale ? "stale" : "";
  }

  nearest(loads) {
    const time = this.timeAt(loads, this.pointer);
    let best = 0;
    loads.forEach((load, index) => {
      if (Math.abs(load.time - time) < Math.abs(loads[best].time - time)) best = index;
    });
    return best;
  }

  span(loads) {
    return Math.max(LEAST_SECONDS, loads.at(-1).time - loads[0].time);
  }

  timeAt(loads, x) {
    return loads.at(-1).time - (1 - x / this.canvas.clientWidth) * this.span(loads);
  }

  draw(loads, lines, pointed) {
    const scale = Math.min(2, devicePixelRatio || 1);
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    if (!loads.length) return;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const end = loads.at(-1).time;
    const shown = this.span(loads);
    const x = (time) => width - ((end - time) / shown) * width;
    const most = this.most ?? Math.max(1e-9, ...lines.flat().filter((value) => value !== undefined));
    const y = (value) => height - BOTTOM - (value / most) * (height - TOP - BOTTOM);
    context.fillStyle = colour("alarm");
    for (const incident of this.model.incidents) {
      if (incident.time > end - shown && incident.time <= end) context.fillRect(x(incident.time), TOP, 1.5, height - TOP - BOTTOM);
    }
    lines.forEach((values, index) => {
      context.strokeStyle = colour(index ? "line-b" : "line-a");
      context.lineWidth = 1.5;
      context.beginPath();
      let pen = false;
      values.forEach((value, at) => {
        if (value === undefined) return;
        const point = [x(loads[at].time), y(value)];
        if (pen) context.lineTo(...point);
        else context.moveTo(...point);
        pen = true;
      });
      context.stroke();
    });
    this.axes(context, width, height, shown, most);
    if (pointed >= 0) {
      context.fillStyle = colour("text");
      context.fillRect(x(loads[pointed].time) - 0.5, TOP, 1, height - TOP - BOTTOM);
    }
  }

  axes(context, width, height, shown, most) {
    context.fillStyle = colour("quiet");
    context.font = "10px system-ui, sans-serif";
    context.textBaseline = "top";
    context.textAlign = "left";
    if (most > 1e-9) context.fillText(this.write(most), 0, 0);
    context.textBaseline = "bottom";
    context.fillText(`−${Math.round(shown)} s`, 0, height);
    context.textAlign = "right";
    context.fillText("now", width, height);
    context.fillRect(0, height - BOTTOM, width, 1);
  }
}

function element(name, text, kind = "") {
  const found = document.createElement(name);
  found.textContent = text;
  if (kind) found.className = kind;
  return found;
}
