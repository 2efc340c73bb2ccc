// Past runs: the list, curves of several over one another, and one run's timeline and samples.

import { get } from "./api.js";
import { alarmElement } from "./alarm.js";
import { Curves, NAMES, lineColour } from "./curves.js";
import { byId, el, svg, table } from "./dom.js";
import { number, plural, when } from "./format.js";
import { drawLanes } from "./lanes.js";
import { sampleElements } from "./samples.js";

const POINTS = 800,
  MOST = 6;
const keyOf = (run) => `${run.name}/${run.attempt}`;
const titleOf = (run) => (run.attempt ? `${run.name}, attempt ${run.attempt}` : run.name);

export class History {
  constructor() {
    this.curves = new Curves(byId("compare-curves"), "compare");
    this.marked = new Map(); // key -> columns
    this.runs = [];
    this.one = null;
    this.timeline = null;
    this.next = null;
    byId("one-lanes-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.showTimeline(numberIn("one-first"));
    });
    byId("one-earlier").addEventListener("click", () => this.turn(-1));
    byId("one-later").addEventListener("click", () => this.turn(1));
    byId("find").addEventListener("submit", (event) => {
      event.preventDefault();
      this.search(null);
    });
    byId("found-more").addEventListener("click", () => this.search(this.next));
    new ResizeObserver(() => this.timeline && drawLanes(byId("one-lanes"), this.timeline)).observe(byId("one-lanes"));
  }

  // key: of the run to open, or null.
  async open(key) {
    this.runs = await get("runs");
    this.drawRuns();
    const run = this.runs.find((one) => keyOf(one) === key);
    if (run) await this.openOne(run);
    else byId("one").hidden = true;
  }

  end() {
    this.marked.clear();
    this.runs = [];
    this.one = null;
    this.timeline = null;
    for (const id of ["runs", "one-lanes", "found"]) byId(id).replaceChildren();
    this.curves.set([]);
    byId("one").hidden = byId("compare").hidden = true;
  }

  drawRuns() {
    if (!this.runs.length) {
      byId("runs").replaceChildren(el("p", { class: "none" }, "No runs here yet."));
      return;
    }
    const rows = this.runs.map((run) => [
      el(
        "span",
        {},
        el("a", { href: `#history/${encodeURIComponent(run.name)}/${run.attempt}` }, titleOf(run)),
        run.current ? el("span", { class: "soft" }, " this run") : null,
      ),
      el("span", { class: "state", "data-state": run.state, title: run.reason || null }, run.state),
      when(run.started_wall_s),
      run.schedule || "–",
      run.iterations_wanted
        ? `${run.iterations} of ${Math.max(run.iterations, run.iterations_wanted)}`
        : String(run.iterations),
      number(run.reward),
      this.mark(run),
    ]);
    byId("runs").replaceChildren(
      table({
        caption: "Runs, newest first",
        hidden: true,
        heads: ["run", "state", "started", "schedule", "iterations", "reward", "curves"],
        rows,
        numeric: [4, 5],
      }),
    );
  }

  mark(run) {
    const key = keyOf(run);
    const box = el("input", {
      type: "checkbox",
      "aria-label": `Show curves of ${titleOf(run)}`,
      checked: this.marked.has(key),
      disabled: run.iterations === 0,
    });
    box.addEventListener("change", async () => {
      if (!box.checked) this.marked.delete(key);
      else if (this.marked.size >= MOST) box.checked = false;
      else this.marked.set(key, { run, ...(await this.columns(run)) });
      this.drawCompare();
    });
    return box;
  }

  columns(run) {
    return get(`runs/${encodeURIComponent(run.name)}/metrics`, { name: NAMES, points: POINTS, attempt: run.attempt });
  }

  drawCompare() {
    const series = [...this.marked.values()].map(({ run, steps, values }) => ({ label: titleOf(run), steps, values }));
    byId("compare").hidden = series.length === 0;
    this.curves.set(series);
    byId("compare-legend").replaceChildren(
      ...series.map((one, at) =>
        el(
          "li",
          {},
          svg(
            "svg",
            { width: 14, height: 4, "aria-hidden": "true" },
            svg("rect", { width: 14, height: 4, fill: lineColour(at) }),
          ),
          one.label,
        ),
      ),
    );
  }

  async openOne(run) {
    this.one = run;
    byId("one").hidden = false;
    byId("one-title").textContent = titleOf(run);
    byId("one-error").replaceChildren(
      ...(run.error
        ? [
            el(
              "div",
              { class: "alarm" },
              alarmElement({ ...run.error, ...run.error.error }, `${run.state}: ${run.error.error.kind}`),
            ),
          ]
        : []),
    );
    if (!this.marked.has(keyOf(run)) && run.iterations && this.marked.size < MOST) {
      this.marked.set(keyOf(run), { run, ...(await this.columns(run)) });
      this.drawRuns();
      this.drawCompare();
    }
    byId("one-first").value = "";
    byId("found").replaceChildren();
    await Promise.all([this.showTimeline(null), this.search(null)]);
    byId("one-title").focus();
  }

  async showTimeline(first) {
    const place = byId("one-lanes");
    try {
      this.timeline = await get(`runs/${encodeURIComponent(this.one.name)}/timeline`, {
        attempt: this.one.attempt,
        first,
        count: numberIn("one-count") ?? 2,
      });
    } catch (error) {
      this.timeline = null;
      place.replaceChildren(el("p", { class: "none" }, error.message));
      return;
    }
    if (this.timeline.steps.length) byId("one-first").value = this.timeline.steps[0];
    drawLanes(place, this.timeline);
    if (this.timeline.cut) place.append(el("p", { class: "soft" }, "There was more than can be shown at once."));
  }

  turn(direction) {
    const count = numberIn("one-count") ?? 2;
    const { first_step, last_step } = this.timeline ?? {};
    const now = numberIn("one-first") ?? last_step ?? 0;
    this.showTimeline(Math.min(Math.max(now + direction * count, first_step ?? 0), last_step ?? 0));
  }

  async search(stepTo) {
    const about = byId("found-about");
    const asked = {
      attempt: this.one.attempt,
      row: numberIn("find-row"),
      reward_from: numberIn("find-low"),
      reward_to: numberIn("find-high"),
      step_from: numberIn("find-from"),
      step_to: stepTo ?? numberIn("find-to"),
    };
    let page;
    try {
      page = await get(`runs/${encodeURIComponent(this.one.name)}/samples`, asked);
    } catch (error) {
      about.textContent = error.message;
      return;
    }
    const found = sampleElements(page.samples, this.one.name, this.one.attempt);
    if (stepTo === null) byId("found").replaceChildren(...found);
    else byId("found").append(...found);
    this.next = page.next_step_to;
    byId("found-more").hidden = this.next === null;
    const shown = byId("found").childElementCount;
    about.textContent =
      page.tables === 0
        ? "This run has kept no samples."
        : `${plural(shown, "prompt", "prompts")}${this.next === null ? "" : ", and perhaps more at earlier steps"}; samples of ${plural(page.tables, "step", "steps")} are kept.`;
  }
}

function numberIn(id) {
  const text = byId(id).value.trim();
  return text === "" || !Number.isFinite(Number(text)) ? null : Number(text);
}
