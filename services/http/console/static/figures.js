// Sparklines of the last minutes, each with its newest value as text.

import { colour } from "./colours.js";

const SECONDS = 180;
const LEAST_SECONDS = 30;

const per = (count, rates) => (rates.seconds > 0 ? count / rates.seconds : 0);
const sum = (load, name) => load.workers.reduce((total, each) => total + each[name], 0);
const share = (part, whole) => (whole > 0 ? part / whole : 0);
const percent = (value) => `${Math.round(value * 100)} %`;
export const duration = (value) => (value < 1 ? `${(value * 1000).toPrecision(3)} ms` : `${value.toPrecision(3)} s`);
const number = (value) => (value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));

/** Title, lines as functions of a load (undefined: nothing to show), and how to write a value. */
const FIGURES = [
  ["TTFT, median and p99", [(load) => load.rates.ttft?.[0], (load) => load.rates.ttft?.[1]], duration],
  ["ITL, median and p99", [(load) => load.rates.itl?.[0], (load) => load.rates.itl?.[1]], duration],
  ["Output tokens/s", [(load) => per(load.rates.outputTokens, load.rates)], number],
  ["Prompt tokens/s", [(load) => per(load.rates.promptTokens, load.rates)], number],
  ["Goodput and completed/s", [(load) => per(load.rates.good, load.rates), (load) => per(load.rates.completed, load.rates)], number],
  ["Running and waiting", [(load) => load.running, (load) => load.waiting], (value) => value.toLocaleString("en")],
  ["Rows occupied", [(load) => share(load.running, sum(load, "rows"))], percent],
  [
    "KV held, and with cached",
    [
      (load) => share(sum(load, "blocks") - sum(load, "free") - sum(load, "cached"), sum(load, "blocks")),
      (load) => share(sum(load, "blocks") - sum(load, "free"), sum(load, "blocks")),
    ],
    percent,
  ],
];

export class Figures {
  constructor(parent, model) {
    this.model = model;
    this.charts = FIGURES.map(([title, lines, write]) => {
      const figure = document.createElement("figure");
      const caption = document.createElement("figcaption");
      const name = document.createElement("span");
      const value = document.createElement("b");
      const canvas = document.createElement("canvas");
      name.textContent = title;
      value.textContent = "–";
      canvas.setAttribute("aria-hidden", "true");
      caption.append(name, value);
      figure.append(caption, canvas);
      parent.append(figure);
      return { lines, write, value, canvas };
    });
  }

  /** Draws the newest loads; call it when one has come. */
  update() {
    const loads = this.model.loads.filter((load) => load.time > (this.model.load?.time ?? 0) - SECONDS);
    for (const chart of this.charts) {
      const values = chart.lines.map((line) => loads.map(line));
      const newest = values.map((line) => line.findLast((value) => value !== undefined));
      chart.value.textContent = newest[0] === undefined ? "–" : newest.map((value) => chart.write(value ?? 0)).join(" / ");
      draw(chart.canvas, loads, values, this.model.incidents);
    }
  }
}

function draw(canvas, loads, lines, incidents) {
  const scale = Math.min(2, devicePixelRatio || 1);
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = width * scale;
  canvas.height = height * scale;
  if (!loads.length) return;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const end = loads.at(-1).time;
  const shown = Math.max(LEAST_SECONDS, end - loads[0].time);
  const x = (time) => width - ((end - time) / shown) * width;
  const most = Math.max(1e-9, ...lines.flat().filter((value) => value !== undefined));
  context.fillStyle = colour("alarm");
  for (const incident of incidents) {
    if (incident.time > end - shown && incident.time <= end) context.fillRect(x(incident.time), 0, 1.5, height);
  }
  lines.forEach((values, index) => {
    context.strokeStyle = colour(index ? "line-b" : "line-a");
    context.lineWidth = 1.5;
    context.beginPath();
    let pen = false;
    values.forEach((value, at) => {
      if (value === undefined) return;
      const point = [x(loads[at].time), height - 2 - (value / most) * (height - 6)];
      if (pen) context.lineTo(...point);
      else context.moveTo(...point);
      pen = true;
    });
    context.stroke();
  });
}
