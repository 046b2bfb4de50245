// Sessions of agents as bands: their states over the last minutes, the tier of a pausing session, and its expected return.

const SPAN_S = 180;
const MAX_KNOWN = 256; // sessions whose past is kept
const MAX_PARTS = 200; // parts of one band
const TIERS = { device: "on the device", host: "in host memory", disk: "on disk" };

/** Returns the kind of a session's state, which names its colour. */
export function kindOf(session) {
  if (session.state !== "pausing") return session.state;
  return session.tier || "evicted";
}

/** The states of the sessions over time: for each session, [start, end, kind] of its parts, oldest first. */
export class Past {
  constructor() {
    this.bands = new Map();
    this.time = 0;
  }

  add(time, sessions) {
    this.time = time;
    for (const session of sessions) {
      const band = this.bands.get(session.number) ?? [];
      const kind = kindOf(session), began = time - session.since;
      const last = band.at(-1);
      if (last && last[2] === kind && began <= last[1]) last[1] = time;
      else band.push([Math.max(began, last ? last[1] : time - SPAN_S), time, kind]);
      while (band.length > MAX_PARTS || (band.length > 1 && band[0][1] < time - SPAN_S)) band.shift();
      this.bands.delete(session.number);
      this.bands.set(session.number, band);
    }
    for (const [number, band] of this.bands) {
      if (this.bands.size <= MAX_KNOWN && band.at(-1)[1] >= time - SPAN_S) break;
      this.bands.delete(number);
    }
  }

  of(number) {
    return this.bands.get(number) ?? [];
  }
}

export class Sessions {
  constructor(body, model) {
    this.body = body;
    this.model = model;
    this.past = new Past();
  }

  /** Forgets the past, because another scheduler numbers its sessions anew. */
  reset() {
    this.past = new Past();
  }

  /** Records the newest snapshot, and shows it unless `isHeld`. */
  update(isHeld) {
    const tables = this.model.tables;
    if (!tables) return;
    if (tables.time < this.past.time) this.past = new Past();
    if (tables.time > this.past.time) this.past.add(tables.time, tables.sessions);
    if (isHeld) return;
    const rows = tables.sessions.map((session) => row(session, this.past.of(session.number), tables.time));
    if (!rows.length) {
      const cell = document.createElement("td");
      cell.colSpan = 6;
      cell.textContent = "No session is known.";
      const empty = document.createElement("tr");
      empty.append(cell);
      rows.push(empty);
    }
    this.body.replaceChildren(...rows);
  }
}

function row(session, parts, now) {
  const found = document.createElement("tr");
  const values = [
    ["Session", session.id || `#${session.number}`], ["Tenant", session.tenant || "(no tenant)"], ["Turn", String(session.turn)],
    ["Tokens", String(session.tokens)], ["State", stateOf(session)],
  ];
  for (const [title, text] of values) {
    const cell = document.createElement("td");
    cell.dataset.title = title;
    cell.textContent = text;
    found.append(cell);
  }
  const cell = document.createElement("td");
  cell.dataset.title = "Last minutes";
  const band = document.createElement("div");
  band.className = "band";
  band.setAttribute("role", "img");
  band.setAttribute("aria-label", parts.map(([from, to, kind]) => `${kind} for ${(to - from).toFixed(0)} s`).join(", "));
  for (const [from, to, kind] of parts) {
    const start = Math.max(from, now - SPAN_S);
    const part = document.createElement("i");
    part.className = kind;
    part.style.left = `${(100 * (start - now + SPAN_S)) / SPAN_S}%`;
    part.style.width = `${(100 * Math.max(0, to - start)) / SPAN_S}%`;
    band.append(part);
  }
  cell.append(band);
  found.append(cell);
  return found;
}

/** Returns a session's state in words. */
export function stateOf(session) {
  const since = `${session.since.toFixed(0)} s`;
  if (session.state === "waiting") return `waits for memory for ${since}`;
  if (session.state !== "pausing") return session.state;
  const where = TIERS[session.tier] ?? "its end was evicted";
  const next = session.expected > 0 ? `, expected in ${session.expected.toFixed(0)} s`
    : session.expected < 0 ? `, late by ${(-session.expected).toFixed(0)} s` : "";
  return `pauses for ${since}, ${where}${next}`;
}
