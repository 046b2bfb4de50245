// The workers, with drain and resume.

import { ask } from "./server.js";

const DRAFTS_S = 10;

/** Returns the drafts of a worker in the last seconds as text; empty without any. */
export function drafts(loads, worker) {
  const newest = loads.at(-1);
  const before = loads
    .filter((load) => load.time >= newest.time - DRAFTS_S)
    .map((load) => load.workers.find((each) => each.id === worker.id))
    // A worker that connected again counts from 0.
    .find((each) => each && each.drafts <= worker.drafts && each.steps <= worker.steps);
  const [verified, steps] = before ? [worker.drafts - before.drafts, worker.steps - before.steps] : [0, 0];
  if (!verified) return "";
  const accepted = Math.round((100 * (worker.acceptedDrafts - before.acceptedDrafts)) / verified);
  return `; drafts: ${steps ? `${(verified / steps).toFixed(1)} per step` : verified}, ${accepted} % accepted`;
}

const KINDS = { full: "full attention", latent: "latent attention", window: "windows", state: "recurrent state" };

/** Returns the kinds of cache of a worker and their memory as text; empty if all layers have full attention. */
export function caches(worker) {
  if (worker.kinds.every((kind) => kind === "full")) return "";
  const held = worker.blocks - worker.free - worker.cached;
  const parts = worker.kinds.map((kind) => {
    const name = KINDS[kind] ?? kind;
    if (kind === "state") return `${name} ${worker.running} of ${worker.rows} rows${memory(worker.running * worker.stateBytes)}`;
    const blocks = kind === "window" ? worker.windowBlocks : Math.max(0, held - worker.windowBlocks);
    return `${name} ${blocks} blocks${memory(blocks * worker.blockBytes)}`;
  });
  const found = worker.checkpoints;
  if (found) parts.push(`checkpoints ${found.used} of ${found.total}: ${found.saved} saved, ${found.restored} restored, ${found.evicted} evicted`);
  return parts.join("; ");
}

function memory(bytes) {
  if (!bytes) return "";
  const power = Math.min(3, Math.floor(Math.log2(bytes) / 10));
  const size = bytes / 2 ** (10 * power);
  return ` (${size.toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB"][power]})`;
}

export class Workers {
  constructor(body, status, confirm, model) {
    this.body = body;
    this.status = status;
    this.confirm = confirm;
    this.model = model;
    this.shown = new Map();
  }

  /** Shows the newest load; rows are kept, so that the focus stays on a button. */
  update() {
    const workers = this.model.load?.workers ?? [];
    const present = new Set(workers.map((each) => each.id));
    for (const [id, line] of this.shown) {
      if (!present.has(id)) {
        line.row.remove();
        this.shown.delete(id);
      }
    }
    for (const worker of workers) {
      const line = this.shown.get(worker.id) ?? this.add(worker.id);
      const held = worker.blocks - worker.free - worker.cached;
      line.device.textContent = `${worker.device} (process ${worker.pid})`;
      line.state.textContent = worker.draining ? (worker.running ? "draining" : "drained") : worker.running ? "running" : "idle";
      line.rows.textContent = `${worker.running} of ${worker.rows}${drafts(this.model.loads, worker)}`;
      line.blocks.textContent = `${held} of ${worker.blocks}, ${worker.cached} cached` + (worker.hostBlocks ? `; host ${worker.heldHostBlocks} of ${worker.hostBlocks}` : "");
      line.caches.textContent = caches(worker);
      line.button.textContent = worker.draining ? "Resume" : "Drain";
      line.button.setAttribute("aria-label", `${line.button.textContent} ${worker.id}`);
      line.draining = worker.draining;
    }
  }

  add(id) {
    const row = document.createElement("tr");
    const name = document.createElement("th");
    name.scope = "row";
    name.textContent = id;
    row.append(name);
    const line = { row, draining: false };
    const titles = { state: "State", rows: "Rows", blocks: "KV blocks held", action: "Action", device: "Device" };
    for (const [column, title] of Object.entries(titles)) {
      row.append((line[column] = document.createElement("td")));
      line[column].dataset.title = title; // a heading on a narrow screen
    }
    const held = document.createElement("div");
    line.caches = document.createElement("div");
    line.caches.className = "quiet";
    line.blocks.append(held, line.caches);
    line.blocks = held;
    line.button = document.createElement("button");
    line.button.type = "button";
    line.button.addEventListener("click", () => this.order(id, line));
    line.action.append(line.button);
    this.body.append(row);
    this.shown.set(id, line);
    return line;
  }

  /** Asks whether to drain; resolves to whether the operator agrees. */
  agrees(id, isLast) {
    const running = this.model.load.workers.find((each) => each.id === id)?.running ?? 0;
    const last = isLast ? " It is the last worker that takes requests: new requests will wait until one is resumed or joins." : "";
    this.confirm.querySelector("#confirm-title").textContent = `Drain ${id}?`;
    this.confirm.querySelector("#confirm-text").textContent = `It finishes its ${running} running requests and takes no new ones.${last}`;
    this.confirm.returnValue = "cancel";
    this.confirm.showModal();
    return new Promise((done) => {
      this.confirm.addEventListener("close", () => done(this.confirm.returnValue === "drain"), { once: true });
    });
  }

  async order(id, line) {
    const path = line.draining ? "resume" : "drain";
    const isLast = !this.model.load.workers.some((each) => each.id !== id && !each.draining);
    if (path === "drain" && !(await this.agrees(id, isLast))) return;
    line.button.disabled = true;
    try {
      await ask(`/console/api/${path}`, path === "drain" ? { worker: id, evenLast: isLast } : { worker: id });
      this.status.textContent = path === "drain" ? `${id} admits no new requests.` : `${id} admits requests again.`;
    } catch (error) {
      this.status.textContent = `${path} ${id}: ${error.message}`;
    } finally {
      line.button.disabled = false;
    }
  }
}
