// The physical KV blocks of each worker, one cell per block in order of its number.

import { colour, ownerPixel, pixel } from "./colours.js";

const HELD = 3;
const MAX_SIDE = 16;
const MIN_SIDE = 3;
const MAX_HEIGHT = 260;

/** Returns the states of the shown blocks, one number each. */
export function cells(blocks) {
  const found = new Int32Array(blocks.lengths.reduce((sum, each) => sum + each, 0));
  let at = 0;
  blocks.lengths.forEach((length, run) => {
    found.fill(blocks.states[run], at, at + length);
    at += length;
  });
  return found;
}

/** Returns what a state means: its kind, and the number of its owner if it has one. */
export function meaning(state, owners) {
  if (state < HELD) return { kind: ["free", "cached", "retired"][state] };
  return { kind: (state - HELD) % 2 ? "shared" : "held", owner: owners[(state - HELD) >> 1] };
}

export class BlockMaps {
  constructor(parent, model, { readout, chosen }) {
    this.parent = parent;
    this.model = model;
    this.readout = readout;
    this.chosen = chosen;
    this.maps = new Map();
  }

  /** Draws the newest snapshot. */
  update() {
    const maps = this.model.tables?.maps ?? [];
    const present = new Set(maps.map((each) => each.worker));
    for (const [worker, map] of this.maps) {
      if (!present.has(worker)) {
        map.box.remove();
        this.maps.delete(worker);
      }
    }
    for (const each of maps) this.show(this.maps.get(each.worker) ?? this.add(each.worker), each);
  }

  add(worker) {
    const box = document.createElement("div");
    const title = document.createElement("h3");
    title.textContent = worker;
    box.append(title);
    const map = { box, device: new Grid(this, `KV blocks of ${worker}`), host: new Grid(this, `KV blocks of ${worker} in host memory`) };
    map.host.box.classList.add("host");
    box.append(map.device.box, map.host.box);
    this.parent.append(box);
    this.maps.set(worker, map);
    return map;
  }

  show(map, found) {
    map.device.show(found.device, found.owners, "device");
    map.host.show(found.host, found.owners, "host");
  }
}

class Grid {
  constructor(maps, label) {
    this.maps = maps;
    this.label = label;
    this.box = document.createElement("div");
    this.text = document.createElement("p");
    this.text.className = "quiet";
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.box.append(this.text, this.canvas);
    this.cells = new Int32Array();
    this.canvas.addEventListener("pointermove", (event) => this.report(this.at(event)));
    this.canvas.addEventListener("click", (event) => {
      const found = this.at(event);
      if (found?.owner !== undefined) this.maps.chosen(found.owner);
    });
  }

  show(blocks, owners, place) {
    this.box.hidden = !blocks.total;
    this.cells = cells(blocks);
    this.owners = owners;
    this.stride = blocks.stride;
    const counts = { held: 0, shared: 0, cached: 0, retired: 0, free: 0 };
    for (const state of this.cells) counts[meaning(state, owners).kind] += 1;
    const shown = blocks.stride > 1 ? `, every ${blocks.stride}th is shown` : "";
    const listed = Object.entries(counts).map(([kind, count]) => `${count} ${kind}`).join(", ");
    this.text.textContent = `${place}: ${blocks.total} blocks${shown}; ${listed}`;
    this.canvas.setAttribute("aria-label", `${this.label}: ${listed}`);
    if (blocks.total) this.draw();
  }

  draw() {
    const width = this.box.clientWidth;
    const count = this.cells.length;
    const fitting = Math.floor(Math.sqrt((width * MAX_HEIGHT) / count));
    const side = Math.max(MIN_SIDE, Math.min(MAX_SIDE, fitting));
    const columns = Math.max(1, Math.floor(width / side));
    const lines = Math.ceil(count / columns);
    [this.columns, this.side] = [columns, side];
    this.canvas.width = columns * side;
    this.canvas.height = lines * side;
    this.canvas.style.width = `${columns * side}px`;
    this.canvas.style.height = `${lines * side}px`;
    const small = new OffscreenCanvas(columns, lines);
    const image = new ImageData(columns, lines);
    const pixels = new Uint32Array(image.data.buffer);
    const plain = ["free", "cached", "retired"].map((name) => pixel(colour(name)));
    this.cells.forEach((state, at) => {
      pixels[at] = state < HELD ? plain[state] : this.pixelOf(state, plain);
    });
    small.getContext("2d").putImageData(image, 0, 0);
    const context = this.canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, columns * side, lines * side);
    this.mark(context);
  }

  pixelOf(state, plain) {
    const { owner } = meaning(state, this.owners);
    return owner === undefined ? plain[2] : ownerPixel(owner);
  }

  /** Draws the dots of shared blocks, and lines between blocks. */
  mark(context) {
    const { side, columns } = this;
    context.fillStyle = colour("shared");
    const dot = Math.max(1, Math.round(side * 0.4));
    const margin = (side - dot) >> 1;
    this.cells.forEach((state, at) => {
      if (state >= HELD && (state - HELD) % 2) {
        context.fillRect((at % columns) * side + margin, Math.floor(at / columns) * side + margin, dot, dot);
      }
    });
    if (side < 6) return;
    context.fillStyle = colour("panel");
    for (let x = 0; x <= columns; x += 1) context.fillRect(x * side, 0, 1, this.canvas.height);
    for (let y = 0; y <= this.canvas.height; y += side) context.fillRect(0, y, this.canvas.width, 1);
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const at = Math.floor((event.clientY - box.top) / this.side) * this.columns + Math.floor((event.clientX - box.left) / this.side);
    return at >= 0 && at < this.cells.length ? { block: at * this.stride, ...meaning(this.cells[at], this.owners) } : null;
  }

  report(found) {
    if (!found) return;
    const owner = found.owner === undefined ? "" : `, ${this.maps.model.name(found.owner)}`;
    this.maps.readout(`Block ${found.block}: ${found.kind}${owner}`);
  }
}
