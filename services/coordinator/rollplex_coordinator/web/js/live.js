// The run that goes on: the event stream told as a story, the coordinator asked once a second, everything drawn at leisure.

import { ApiError, events, get, post } from "./api.js";
import { showAlarm } from "./alarm.js";
import { Curves, NAMES } from "./curves.js";
import { byId, el } from "./dom.js";
import { plural } from "./format.js";
import { drawLanes } from "./lanes.js";
import { drawMemory } from "./memory.js";
import { sampleElements } from "./samples.js";
import { drawFacts, drawGoal, drawNotes, drawServices, drawWaits } from "./standing.js";
import { Story } from "./story.js";

const ASK_MS = 1000,
  DRAW_MS = 250,
  SAY_MS = 5000,
  AGAIN_MS = 1500,
  MOST_MS = 12_000,
  LAST_EVENTS = 3000,
  POINTS = 1500;
const ABOUT = {
  IDLE: "Nothing runs; it waits for the next start.",
  LOAD: "Weights are filled and mapped, processes come up.",
  ROLLOUT: "Tokens are sampled; prefix work runs in the window.",
  SCORE: "The reference scores the responses.",
  TRAIN: "Suffixes and prefixes run backward.",
  UPDATE: "The gate is closed: vote, step, publish.",
  CHECKPOINT: "Weights and optimizer state are written to disk.",
  EVAL: "Held-out rows are answered; nothing changes.",
  DRAIN: "The run is ending.",
};

export class Live {
  constructor() {
    this.story = new Story(NAMES);
    this.curves = new Curves(byId("curves"), "live");
    this.status = null;
    this.history = null; // columns from before the stream began
    this.offset_s = null; // the run's clock minus this page's
    this.held = false;
    this.stop = null;
    this.lastSamples = "";
    this.wire();
  }

  wire() {
    byId("controls").addEventListener("submit", (event) => {
      event.preventDefault();
      const count = Number(byId("count").value);
      if (Number.isInteger(count) && count >= 1)
        this.ask("iterations", { count }, `${plural(count, "more iteration", "more iterations")} asked for.`);
      else byId("said").textContent = "A whole number from 1 on.";
    });
    byId("stop-after").addEventListener("click", () =>
      this.ask("stop", { when: "after_iteration", exit: false }, "No further iteration begins."),
    );
    byId("stop-end").addEventListener("click", () =>
      this.ask("stop", { when: "after_iteration", exit: true }, "The run ends after this iteration."),
    );
    byId("stop-now").addEventListener("click", () => byId("sure").showModal());
    byId("sure").addEventListener("close", () => {
      if (byId("sure").returnValue === "yes") this.ask("stop", { when: "now", exit: true }, "Stopping now.");
      byId("sure").returnValue = "";
    });
    byId("lanes-count").addEventListener("change", () => this.drawLanes(true));
    byId("lanes-hold").addEventListener("click", (event) => {
      this.held = !this.held;
      event.currentTarget.setAttribute("aria-pressed", String(this.held));
    });
  }

  async ask(path, body, text) {
    const said = byId("said");
    try {
      this.status = await post(path, body);
      said.className = "soft";
      said.textContent = text;
      this.drawStatus();
    } catch (error) {
      said.className = "bad";
      said.textContent = error instanceof ApiError ? error.message : "The coordinator does not answer.";
    }
  }

  start() {
    const stop = new AbortController();
    this.stop = stop;
    this.follow(stop.signal);
    this.poll(stop.signal);
    this.timer = setInterval(() => this.draw(), DRAW_MS);
    this.observer = new ResizeObserver(() => this.drawLanes(true));
    this.observer.observe(byId("lanes"));
  }

  end() {
    this.stop?.abort();
    this.stop = null;
    clearInterval(this.timer);
    this.observer?.disconnect();
    this.anew();
    this.run = undefined;
    this.lastSamples = this.askedSamples = "";
    this.link = "";
    showAlarm(null);
  }

  // --- what comes in -------------------------------------------------------------------------------------------------

  async follow(signal) {
    let after = null;
    let wait_ms = AGAIN_MS;
    while (!signal.aborted) {
      try {
        after = await this.sameRun(after, signal);
        if (this.history === null) this.history = await this.past(signal);
        for await (const found of events({ after, last: LAST_EVENTS, signal })) {
          this.linked("on");
          wait_ms = AGAIN_MS;
          for (const event of found) {
            this.story.tell(event);
            after = event.id;
          }
          if (found.length)
            this.offset_s = Math.max(this.offset_s ?? -Infinity, found.at(-1).monotonic_s - performance.now() / 1e3);
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof ApiError && error.status === 409) after = this.anew(); // another journal than before
      }
      this.linked(this.story.ended ? "ended" : "lost");
      await pause(wait_ms, signal);
      wait_ms = Math.min(2 * wait_ms, MOST_MS);
    }
  }

  // Behind the same address there may be another run than before: then all begins anew. Gives the event to go on after.
  async sameRun(after, signal) {
    let run;
    try {
      ({ run } = await get("status", {}, signal));
    } catch (error) {
      if (error instanceof ApiError && error.status >= 500) return after; // the core is busy, the journal can be read
      throw error;
    }
    const same = this.run === undefined || this.run === run;
    this.run = run;
    return same ? after : this.anew();
  }

  anew() {
    this.history = null;
    this.offset_s = null;
    this.askedSamples = "";
    this.story.reset();
    this.story.rows = [];
    return null;
  }

  async past(signal) {
    const columns = await get("runs/this/metrics", { name: NAMES, points: POINTS }, signal);
    return columns.steps.length ? columns : { steps: [], values: {} };
  }

  async poll(signal) {
    while (!signal.aborted) {
      if (!document.hidden && this.link !== "ended" && this.link !== "lost") {
        try {
          const [status, ledger, services] = await Promise.all([
            get("status", {}, signal),
            get("ledger", {}, signal),
            get("services", {}, signal),
          ]);
          this.status = status;
          this.drawStatus();
          drawMemory(byId("memory"), ledger);
          drawServices(byId("services"), services);
          await this.drawSamples(signal);
        } catch (error) {
          if (signal.aborted) return;
          if (!(error instanceof ApiError) && !(error instanceof TypeError)) throw error; // no answer: `follow` says so
        }
      }
      await pause(ASK_MS, signal);
    }
  }

  linked(state) {
    this.link = state;
    for (const id of ["start", "stop-after", "stop-end", "stop-now"]) byId(id).disabled = state === "ended";
    const texts = { on: this.status?.run ?? "connected", lost: "no answer, trying again", ended: "the run has ended" };
    byId("link").dataset.state = state === "ended" ? "off" : state;
    byId("link-text").textContent = texts[state];
  }

  // --- what is shown -------------------------------------------------------------------------------------------------

  draw() {
    this.drawPhase();
    showAlarm(this.story.alarm, this.story.ended);
    if (document.hidden) return;
    this.drawLanes(false);
    this.drawCurves();
  }

  // What is read aloud: not every phase of a run that goes through ten in a second.
  sayPhase(phase) {
    const now = performance.now();
    if (phase === this.saidPhase || (now - (this.saidAt ?? -Infinity) < SAY_MS && phase !== "ENDED")) return;
    this.saidPhase = phase;
    this.saidAt = now;
    byId("phase-said").textContent = `Phase ${phase.toLowerCase()}`;
  }

  drawPhase() {
    const ended = this.story.ended;
    const phase = ended ? "ENDED" : (this.story.phase ?? this.status?.phase ?? "");
    const place = byId("phase");
    if (phase) this.sayPhase(phase);
    if (place.dataset.phase === phase) return;
    place.dataset.phase = phase;
    place.textContent = phase;
    byId("phase-about").textContent = ended
      ? `${this.story.alarm ? "" : `${ended.reason}, `}exit code ${ended.exit_code}`
      : (ABOUT[phase] ?? "");
  }

  drawStatus() {
    const status = this.status;
    drawGoal(status);
    drawFacts(byId("facts"), status);
    drawWaits(byId("waits"), status.waiting);
    drawNotes(byId("notes"), status);
    for (const id of ["start", "stop-after", "stop-end"])
      byId(id).disabled = status.stopping !== null || this.link === "ended";
  }

  drawLanes(anyway) {
    const story = this.story;
    if (this.held && !anyway) return;
    const last = story.phases.at(-1);
    const open = last?.end_s === null && !story.ended && story.phase !== "IDLE" && story.phase === this.status?.phase;
    const now_s =
      open && this.offset_s !== null ? Math.max(story.clock_s, performance.now() / 1e3 + this.offset_s) : story.clock_s;
    const key = `${story.clock_s} ${open ? Math.floor(now_s * 4) : ""}`;
    if (!anyway && key === this.drawnLanes) return;
    this.drawnLanes = key;
    drawLanes(byId("lanes"), story.timeline(Number(byId("lanes-count").value), now_s));
  }

  drawCurves() {
    const rows = this.story.rows;
    const last = rows.at(-1)?.step ?? -1;
    if (this.history === null || (this.drawnStep === last && this.drawnHistory === this.history)) return;
    this.drawnStep = last;
    this.drawnHistory = this.history;
    const first = rows[0]?.step ?? Infinity;
    const kept = this.history.steps.map((step, at) => [step, at]).filter(([step]) => step < first);
    const steps = [...kept.map(([step]) => step), ...rows.map((row) => row.step)];
    if (!steps.length) {
      this.curves.set([]);
      return;
    }
    const values = Object.fromEntries(
      NAMES.map((name) => [
        name,
        [
          ...kept.map(([, at]) => this.history.values[name]?.[at] ?? null),
          ...rows.map((row) => row.metrics[name] ?? null),
        ],
      ]),
    );
    this.curves.set([{ label: "", steps, values }]);
  }

  async drawSamples(signal) {
    const rounds = `${this.story.tables} ${this.story.phase === "IDLE"}`;
    if (this.askedSamples === rounds) return;
    this.askedSamples = rounds;
    const found = await get("runs/this/samples", { limit: 1 }, signal);
    const groups = found.samples.slice(0, 4);
    const key = JSON.stringify(groups);
    if (key === this.lastSamples) return;
    this.lastSamples = key;
    byId("samples-about").textContent = groups.length
      ? `step ${groups[0].step}, ${plural(found.tables, "table", "tables")} in all: see History`
      : "";
    byId("samples").replaceChildren(
      ...(groups.length
        ? sampleElements(groups, "this", 0)
        : [el("p", { class: "none" }, "None yet: the configuration's run.sample_every says how often some are kept.")]),
    );
  }
}

const pause = (ms, signal) =>
  new Promise((done) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      done();
    };
    const timer = setTimeout(end, ms);
    signal.addEventListener("abort", end);
  });
