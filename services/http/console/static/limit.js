// What holds the service back now: the state, what would help, and who waits. The scheduler makes the words.

export class PresentLimit {
  constructor(box, model) {
    this.box = box;
    this.model = model;
    [this.state, this.remedy, this.waits] = ["b", "span", "span"].map((name) => box.appendChild(document.createElement(name)));
  }

  /** Shows the limit of the newest load; `isStale` says that no newer one has come for a while. */
  update(isStale = false) {
    const limit = this.model.load?.limit;
    if (!limit) return;
    const texts = [[this.state, limit.state], [this.remedy, limit.remedy && `What helps: ${limit.remedy}.`], [this.waits, limit.waits && `${limit.waits}.`]];
    for (const [part, text] of texts) {
      if (part.textContent !== text) part.textContent = text;
    }
    this.box.dataset.kind = isStale ? "stale" : ["idle", "none", "decode bandwidth"].includes(limit.kind) ? "calm" : "limit";
  }
}
