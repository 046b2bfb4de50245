// The waiting requests: by what they wait for in the order of the policy, and by tenant.

const TITLES = {
  room: "Ready: wait for a row, memory or a place in a step",
  assigned_worker: "Wait for the next plan of a worker",
  prefix: "Wait for a prefix that another request computes",
  grammar: "Wait for a grammar",
  session: "New sessions: wait for memory",
  tenant_limit: "Wait for their tenant's limit",
  credit: "Wait for their reader",
  worker: "Wait for a worker that can serve them",
};
const ORDERS = {
  balanced: "half of the prompt tokens in order of arrival, half to the shortest prompts first",
  fcfs: "first come, first served",
  priority: "by priority, which rises while a request waits",
  sjf: "shortest job first",
  edf: "earliest deadline first",
  slo: "least slack first, by targets for the first token; those that miss theirs last",
  fair: "the tenant with the least service first",
  lpm: "longest cached prefix first, within a window of the oldest requests",
};

export class Queues {
  constructor(parent, policy, model, chosen) {
    this.parent = parent;
    this.policy = policy;
    this.model = model;
    this.chosen = chosen;
    this.parent.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-number]");
      if (button) chosen(Number(button.dataset.number));
    });
  }

  /** Shows the newest snapshot. */
  update() {
    const tables = this.model.tables;
    const load = this.model.load;
    if (!tables || !load) return;
    this.policy.textContent = `Policy ${tables.policy}: ${ORDERS[tables.policy] ?? tables.policy}.`;
    const listed = new Map(tables.queues.map((queue) => [queue.reason, queue]));
    const boxes = [];
    for (const reason of new Set([...Object.keys(TITLES), ...Object.keys(load.byReason)])) {
      const queue = listed.get(reason) ?? { reason, length: load.byReason[reason] ?? 0, first: [] };
      if (queue.length) boxes.push(box(queue));
    }
    if (load.byTenant.length) boxes.push(tenants(load));
    if (!boxes.length) boxes.push(element("p", "No request waits.", "quiet"));
    this.parent.replaceChildren(...boxes);
  }
}

function box(queue) {
  const found = document.createElement("div");
  found.append(element("h3", `${TITLES[queue.reason] ?? queue.reason} (${queue.length})`));
  const list = document.createElement("ol");
  for (const each of queue.first) {
    const item = document.createElement("li");
    const button = element("button", each.id, "link");
    button.type = "button";
    button.dataset.number = each.number;
    const tenant = each.tenant ? `, ${each.tenant}` : "";
    const kind = each.class ? `, class ${each.class}` : "";
    const priority = each.priority ? `, priority ${each.priority}` : "";
    item.append(button, ` ${each.tokens} tokens${tenant}${kind}${priority}, ${each.waited.toFixed(1)} s, waits for ${each.waitsFor}`);
    list.append(item);
  }
  found.append(list);
  const more = queue.length - queue.first.length;
  if (queue.first.length && more > 0) found.append(element("p", `and ${more} more`, "quiet"));
  return found;
}

function tenants(load) {
  const found = document.createElement("div");
  found.append(element("h3", "By tenant"));
  const list = document.createElement("ul");
  list.className = "tenants";
  for (const [tenant, count] of load.byTenant) {
    const item = document.createElement("li");
    const meter = document.createElement("meter");
    meter.max = Math.max(1, load.waiting);
    meter.value = count;
    item.append(element("span", tenant || "(no tenant)"), meter, element("span", String(count)));
    meter.setAttribute("aria-label", `waiting requests of ${tenant || "no tenant"}`);
    list.append(item);
  }
  found.append(list);
  return found;
}

function element(name, text, kind = "") {
  const found = document.createElement(name);
  found.textContent = text;
  if (kind) found.className = kind;
  return found;
}
