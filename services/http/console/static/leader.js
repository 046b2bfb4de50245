// The scheduler that leads and its standbys, in one line. It is hidden if the service has no standbys.

export class Leader {
  constructor(box, model) {
    this.box = box;
    this.model = model;
  }

  /** Shows the leader of the newest load. */
  update() {
    const found = this.model.load?.leadership;
    this.box.hidden = !found;
    if (!found) return;
    const number = found.number && ` under number ${found.number}`;
    const copying = found.others ? `, ${found.others} copying` : "";
    const behind = found.lag ? `, ${found.lag} bytes of the journal behind` : "";
    const text = `Leader: ${found.leader}${number} for ${time(found.seconds)}. Standbys: ${found.ready || "none"} ready${copying}${behind}.`;
    if (this.box.textContent !== text) this.box.textContent = text;
    this.box.dataset.kind = found.ready ? "calm" : "limit";
  }
}

function time(seconds) {
  if (seconds < 120) return `${seconds} s`;
  return seconds < 7200 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
}
