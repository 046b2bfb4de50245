// The console: reads the live view and lets each part of the page draw it.

import { BlockMaps, cells } from "./blocks.js";
import { Details } from "./details.js";
import { Figures } from "./figures.js";
import { Gantt, owners } from "./gantt.js";
import { Leader } from "./leader.js";
import { PresentLimit } from "./limit.js";
import { Memory } from "./memory.js";
import { Model, cell } from "./model.js";
import { Playground } from "./playground.js";
import { Prediction } from "./predict.js";
import { Queues } from "./queues.js";
import { Refusal, ask, events, send, setToken } from "./server.js";
import { Sessions } from "./sessions.js";
import { Strategies } from "./strategies.js";
import { chooseTheme } from "./theme.js";
import { Workers } from "./workers.js";

const RETRY_MS = [500, 1000, 2000, 5000];
const HIDDEN_MS = 30000; // a page that nobody sees ends its view after this time
const SUMMARY_MS = 10000;
const SILENT_MS = 5000; // the load comes every second
const MAX_LISTED = 200;

const part = (name) => document.getElementById(name);
const model = new Model();
const details = new Details(part("details"), model);
const choose = (number) => details.show(number);
const gantt = new Gantt(part("gantt"), model, { readout: (text) => say("hover", text), chosen: choose });
const blocks = new BlockMaps(part("blocks"), model, { readout: (text) => say("block-hover", text), chosen: choose });
const figures = new Figures(part("figures"), model);
const limit = new PresentLimit(part("now"), model);
const leader = new Leader(part("leader"), model);
const memory = new Memory(part("memory"), part("memory-by"), model, choose, (map) => cells(map.device));
const workers = new Workers(part("workers"), part("order"), part("confirm"), model);
const queues = new Queues(part("queues"), part("policy"), model, choose);
const sessions = new Sessions(part("sessions").tBodies[0], model);
const strategies = new Strategies(part("strategies"), {
  status: part("strategies-status"), result: part("strategies-result"), table: part("strategies-table"), charts: part("strategies-charts"),
});
const prediction = new Prediction(part("predict"), {
  status: part("predict-status"), result: part("predict-result"), table: part("predict-table"), notes: part("predict-notes"),
});
new Playground(part("playground"), {
  stop: part("stop"), status: part("sent"), answers: part("answers"), followed: gantt.followed,
});

let paused = false;
let watching = null;
let heardAt = performance.now();
const frames = [];

function say(name, text) {
  if (part(name).textContent !== text) part(name).textContent = text;
}

function state(text, kind = "") {
  say("state", text);
  part("state").dataset.kind = kind;
}

// ---------------------------------------------------------------- the stream

async function watch() {
  for (let attempt = 0; ; attempt += 1) {
    if (document.hidden) await visible();
    if (paused) await new Promise((done) => part("pause").addEventListener("click", done, { once: true }));
    watching = new AbortController();
    let trouble = "the stream has ended";
    try {
      const response = await send("/console/api/watch", { tables: true }, watching.signal);
      part("access").hidden = true;
      model.reset();
      gantt.reset();
      sessions.reset();
      for await (const message of events(response)) {
        attempt = 0;
        take(message);
      }
    } catch (error) {
      if (error instanceof Refusal && (error.status === 401 || error.status === 403)) {
        state("Not connected", "bad");
        await access(error.message);
        continue;
      }
      if (watching.signal.aborted) continue;
      trouble = error.message;
    }
    state(`Not connected: ${trouble}; trying again`, "bad");
    await new Promise((done) => setTimeout(done, RETRY_MS[Math.min(attempt, RETRY_MS.length - 1)]));
  }
}

/** Asks for a token; resolves when there is one to try. */
function access(message) {
  say("refusal", message);
  part("access").hidden = false;
  part("token").focus();
  return new Promise((done) => {
    part("access").addEventListener("submit", (event) => {
      event.preventDefault();
      setToken(part("token").value);
      part("token").value = "";
      done();
    }, { once: true });
  });
}

function visible() {
  return new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) setTimeout(() => document.hidden && watching?.abort(), HIDDEN_MS);
});

function take(message) {
  model.take(message);
  if (message.traceUrl !== undefined) {
    say("model", message.model);
    say("release", `Quire ${message.release}`);
  }
  if (gantt.worker === null && message.steps) gantt.show(message.steps[0].worker);
  if (message.load) {
    heardAt = performance.now();
    const missed = model.dropped ? `; ${model.dropped} steps were left out, because this page was too slow` : "";
    state(`Live: ${message.load.running} running, ${message.load.waiting} waiting${missed}`);
    listWorkers(message.load.workers);
    limit.update();
    leader.update();
    figures.update();
    workers.update();
    listRequests();
  }
  if (message.tables) {
    blocks.update();
    if (!isUsed(part("queues"))) queues.update();
    if (!isUsed(part("memory").tBodies[0])) memory.update();
    sessions.update(isUsed(part("sessions").tBodies[0]));
  }
  if (message.incidents) listIncidents();
}

/** Shows the releases and the settings, once they are asked for. */
async function showService() {
  try {
    const found = await ask("/console/api/service", {});
    say("release", `Quire ${found.frontend}${found.scheduler === found.frontend ? "" : `, scheduler ${found.scheduler}`}`);
    part("settings").replaceChildren(...Object.entries(found.settings).sort().map(([name, value]) => {
      const line = document.createElement("tr");
      const title = document.createElement("th");
      title.scope = "row";
      title.textContent = name;
      line.append(title);
      line.insertCell().textContent = value;
      return line;
    }));
  } catch (error) {
    say("release", `Settings: ${error.message}`);
  }
}

// ---------------------------------------------------------------- lists

function listWorkers(found) {
  const select = part("worker");
  const names = found.map((each) => each.id);
  if (gantt.worker === null && names.length) gantt.show(names[0]);
  if (names.join("\n") === [...select.options].map((each) => each.value).join("\n")) return;
  select.replaceChildren(...names.map((name) => new Option(name, name, false, name === gantt.worker)));
  if (!names.includes(gantt.worker) && names.length) gantt.show((select.value = names[0]));
}

/** Returns whether a list is in use: the focus is in it, or comes back to it when the dialog closes. */
function isUsed(list) {
  return part("details").open || list.contains(document.activeElement);
}

function listRequests() {
  if (!part("table-details").open || isUsed(part("requests"))) return;
  const steps = gantt.steps;
  const step = steps?.count ? steps.get(gantt.newest(steps).step) : undefined;
  const numbers = step ? [...owners(step, gantt.rows)] : [];
  const lines = [];
  numbers.forEach((number, row) => {
    if (number < 0 || lines.length >= MAX_LISTED) return;
    const request = model.requests.get(number) ?? {};
    const line = document.createElement("tr");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "link";
    button.textContent = model.name(number);
    button.addEventListener("click", () => choose(number));
    const name = document.createElement("th");
    name.scope = "row";
    name.append(button);
    line.append(name);
    for (const value of [row, cell(step, row)[0], request.tenant || "–", request.prompt ?? "–", request.max ?? "–"]) {
      line.insertCell().textContent = value;
    }
    lines.push(line);
  });
  part("requests").replaceChildren(...lines);
}

function listIncidents() {
  const lines = model.incidents.slice(-50).reverse().map((incident) => {
    const line = document.createElement("li");
    const time = document.createElement("time");
    const moment = new Date(incident.time * 1000);
    time.dateTime = moment.toISOString();
    time.textContent = moment.toLocaleTimeString();
    const about = [incident.worker, incident.request, incident.detail].filter(Boolean).join(", ");
    line.append(time, ` ${incident.kind.replaceAll("_", " ")}: ${about}`);
    return line;
  });
  part("incidents").replaceChildren(...lines);
}

// ---------------------------------------------------------------- the page

part("settings-details").addEventListener("toggle", (event) => event.target.open && showService());
part("worker").addEventListener("change", (event) => gantt.show(event.target.value));
part("zoom").addEventListener("input", (event) => {
  gantt.seconds = Number(event.target.value);
  part("zoom-value").value = event.target.value;
});
part("pause").addEventListener("click", (event) => {
  paused = !paused;
  event.target.setAttribute("aria-pressed", String(paused));
  event.target.textContent = paused ? "Continue" : "Pause";
  if (paused) {
    // Nothing is sent meanwhile; the view begins anew afterwards.
    watching?.abort();
    state("Paused: what happens meanwhile is not shown");
  } else state("Connecting …");
});
chooseTheme(part("theme"), () => {
  gantt.reset();
  figures.update();
  blocks.update();
  strategies.draw();
});
setInterval(() => {
  const seconds = (performance.now() - heardAt) / 1000;
  const isSilent = model.load && seconds * 1000 > SILENT_MS;
  part("figures").classList.toggle("stale", Boolean(isSilent));
  limit.update(isSilent);
  if (isSilent && !paused) state(`No figures for ${seconds.toFixed(0)} s`, "bad");
}, 1000);
setInterval(() => {
  const load = model.load;
  if (load && !paused) say("summary", `${load.running} requests run, ${load.waiting} wait, on ${load.workers.length} workers.`);
}, SUMMARY_MS);

const calm = matchMedia("(prefers-reduced-motion: reduce)");
let before = 0;
function frame(now) {
  requestAnimationFrame(frame);
  if (calm.matches && now - before < 1000) return;
  gantt.frame(calm.matches ? 1 : (now - before) / 1000);
  before = now;
  frames.push(now);
  if (frames.length > 600) frames.shift();
}
requestAnimationFrame(frame);
watch();

// For tests and for curious people in the browser's tools; the page itself does not read it.
globalThis.quire = { model, gantt, blocks, memory, prediction, strategies, frames };
