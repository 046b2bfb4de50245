// Who uses the KV memory: requests and tenants with their blocks, as a list that its headings sort.

import { meaning } from "./blocks.js";

const MOST = 20;

/** Returns [owner, blocks, tokens, share of all blocks] of each request that holds blocks, from the shown cells. */
export function holdings(maps, cellsOf) {
  const found = new Map();
  let total = 0;
  for (const map of maps) {
    total += map.device.total;
    const tokens = new Map(map.owners.map((owner, at) => [owner, map.tokens[at]]));
    for (const state of cellsOf(map)) {
      const { owner } = meaning(state, map.owners);
      if (owner === undefined) continue;
      const held = found.get(owner) ?? { owner, blocks: 0, tokens: tokens.get(owner) ?? 0 };
      held.blocks += map.device.stride;
      found.set(owner, held);
    }
  }
  return [...found.values()].map((held) => ({ ...held, share: total ? held.blocks / total : 0 }));
}

export class Memory {
  constructor(table, choice, model, chosen, cellsOf) {
    this.body = table.tBodies[0];
    this.choice = choice;
    this.model = model;
    this.cellsOf = cellsOf;
    this.order = "blocks";
    this.isDescending = true;
    this.headings = [...table.querySelectorAll("th button")];
    for (const heading of this.headings) heading.addEventListener("click", () => this.sort(heading.dataset.column));
    this.body.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-number]");
      if (button) chosen(Number(button.dataset.number));
    });
    choice.addEventListener("change", () => this.update());
    this.mark();
  }

  sort(column) {
    this.isDescending = column === this.order ? !this.isDescending : column === "blocks" || column === "share";
    this.order = column;
    this.mark();
    this.update();
  }

  mark() {
    for (const heading of this.headings) {
      const isChosen = heading.dataset.column === this.order;
      heading.parentElement.setAttribute("aria-sort", isChosen ? (this.isDescending ? "descending" : "ascending") : "none");
    }
  }

  /** Shows the newest snapshot. */
  update() {
    const maps = this.model.tables?.maps ?? [];
    const held = holdings(maps, this.cellsOf).map((each) => {
      const request = this.model.requests.get(each.owner);
      return { ...each, name: this.model.name(each.owner), tenant: request?.tenant || "–", requests: 1 };
    });
    const lines = this.choice.value === "tenant" ? byTenant(held) : held;
    const sign = this.isDescending ? -1 : 1;
    lines.sort((a, b) => sign * (a[this.order] < b[this.order] ? -1 : a[this.order] > b[this.order] ? 1 : 0));
    this.body.replaceChildren(...lines.slice(0, MOST).map(line));
    if (!lines.length) {
      const cell = this.body.insertRow().insertCell();
      cell.colSpan = 5;
      cell.textContent = "No request holds KV memory.";
    }
  }
}

function byTenant(held) {
  const found = new Map();
  for (const each of held) {
    const known = found.get(each.tenant) ?? { tenant: each.tenant, blocks: 0, tokens: 0, share: 0, requests: 0 };
    for (const name of ["blocks", "tokens", "share", "requests"]) known[name] += each[name];
    found.set(each.tenant, { ...known, name: `${known.requests} request${known.requests === 1 ? "" : "s"}` });
  }
  return [...found.values()];
}

function line(each) {
  const row = document.createElement("tr");
  const name = document.createElement("th");
  name.scope = "row";
  if (each.owner === undefined) name.textContent = each.name;
  else {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "link";
    button.dataset.number = each.owner;
    button.textContent = each.name;
    name.append(button);
  }
  row.append(name);
  const percent = (100 * each.share).toFixed(each.share < 0.1 ? 1 : 0);
  for (const value of [each.tenant, each.blocks.toLocaleString("en"), each.tokens.toLocaleString("en"), `${percent} %`]) row.insertCell().textContent = value;
  return row;
}
