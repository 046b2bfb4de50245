// What the page knows: the newest steps of each worker, the requests, the load of the last minutes, and the tables.

export const MAX_STEPS = 1024;
const MAX_REQUESTS = 20000;
const MAX_LOADS = 600;
const MAX_INCIDENTS = 200;

/** Rows with the numbers of their requests, which change from step to step. */
class Rows {
  constructor() {
    this.numbers = new Map();
    this.columns = [[], []];
  }

  /** Applies a change, if there is one; returns the rows and the numbers. Columns that were returned never change. */
  after(change) {
    if (change) {
      const [gone, rows, numbers] = change;
      for (const row of gone) this.numbers.delete(row);
      rows.forEach((row, at) => this.numbers.set(row, numbers[at]));
      this.columns = [[...this.numbers.keys()], [...this.numbers.values()]];
    }
    return this.columns;
  }
}

/** The steps of one worker; step `index` (0 is the first one that this page saw) is at `index % MAX_STEPS`. */
class Steps {
  constructor() {
    this.count = 0;
    this.ring = new Array(MAX_STEPS);
    this.rows = 0;
    this.decode = new Rows();
    this.waiting = new Rows();
  }

  add(step) {
    const [decode, waiting] = [this.decode.after(step.decode), this.waiting.after(step.waiting)];
    const prefill = step.prefill ?? [[], [], []];
    this.ring[this.count % MAX_STEPS] = {
      number: step.step, start: step.start, seconds: step.seconds, decode, waiting, prefill,
    };
    for (const rows of [decode[0], waiting[0], prefill[0]]) {
      for (const row of rows) if (row >= this.rows) this.rows = row + 1;
    }
    this.count += 1;
  }

  /** Returns a step, or undefined if it is not known any more or not yet. */
  get(index) {
    return index >= this.first && index < this.count ? this.ring[index % MAX_STEPS] : undefined;
  }

  get first() {
    return Math.max(0, this.count - MAX_STEPS);
  }

  /** Returns the index of the last step that began before a time, or -1. */
  at(time) {
    let low = this.first, high = this.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.get(middle).start <= time) low = middle + 1;
      else high = middle;
    }
    return low > this.first ? low - 1 : -1;
  }
}

export class Model {
  constructor() {
    this.traceUrl = "";
    this.requests = new Map();
    this.incidents = [];
    this.loads = [];
    this.tables = null;
    this.dropped = 0;
    this.reset();
  }

  /** Forgets what a new stream counts anew: steps and the numbers of requests. */
  reset() {
    this.workers = new Map();
    this.requests.clear();
    this.tables = null;
  }

  take(message) {
    if (message.traceUrl !== undefined) this.traceUrl = message.traceUrl;
    for (const [number, id, tenant, prompt, max, trace] of message.requests ?? []) {
      this.requests.delete(number);
      this.requests.set(number, { number, id, tenant, prompt, max, trace });
    }
    for (const number of this.requests.keys()) {
      if (this.requests.size <= MAX_REQUESTS) break;
      this.requests.delete(number);
    }
    for (const step of message.steps ?? []) this.steps(step.worker).add(step);
    for (const worker of message.forgotten ?? []) this.workers.delete(worker);
    if (message.load) {
      for (const worker of message.load.workers) worker.steps = this.workers.get(worker.id)?.count ?? 0;
      this.loads.push(message.load);
      if (this.loads.length > MAX_LOADS) this.loads.shift();
    }
    if (message.tables) {
      this.tables = message.tables;
      for (const queue of this.tables.queues) {
        for (const each of queue.first) {
          if (!this.requests.has(each.number)) this.requests.set(each.number, { ...each, prompt: each.tokens, max: 0, trace: "" });
        }
      }
    }
    for (const incident of message.incidents ?? []) this.incidents.push(incident);
    if (this.incidents.length > MAX_INCIDENTS) this.incidents.splice(0, this.incidents.length - MAX_INCIDENTS);
    this.dropped += message.dropped ?? 0;
  }

  /** Returns the steps of a worker. */
  steps(worker) {
    let found = this.workers.get(worker);
    if (!found) this.workers.set(worker, (found = new Steps()));
    return found;
  }

  get load() {
    return this.loads.at(-1);
  }

  /** Returns a request's ID, or a placeholder for one whose name has not come. */
  name(number) {
    return this.requests.get(number)?.id ?? `request ${number}`;
  }
}

/** Returns what a step does with a row: [phase, number of the request, tokens], or null if the row is idle. */
export function cell(step, row) {
  const prefill = step.prefill[0].indexOf(row);
  if (prefill >= 0) return ["prefill", step.prefill[1][prefill], step.prefill[2][prefill]];
  const decode = step.decode[0].indexOf(row);
  if (decode >= 0) return ["decode", step.decode[1][decode], 1];
  const waiting = step.waiting[0].indexOf(row);
  return waiting >= 0 ? ["held out", step.waiting[1][waiting], 0] : null;
}
