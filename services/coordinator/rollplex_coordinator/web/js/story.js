// The journal's events told as phases, lanes and numbers of the last iterations. Pure: events in, what to draw out.

const KEPT = 12; // iterations of the timeline
const MOST_ROWS = 6000; // iterations of the curves: above it, every second of the older ones goes
const NEWEST_ROWS = 500;
const REWARDS = "rewards";

export class Story {
  // names: of the numbers that are kept of each iteration; null: all.
  constructor(names = null) {
    this.names = names;
    this.reset();
  }

  reset() {
    this.phases = []; // {name, kind, start_s, end_s, step}
    this.lanes = new Map(); // service -> spans
    this.starts = []; // {step, at_s} of iterations, oldest first
    this.rows = []; // {step, metrics}
    this.phase = null;
    this.alarm = null; // the error that matters, with what happened to a service
    this.died = null; // the service that ended, if that is of this run
    this.ended = null;
    this.clock_s = 0;
    this.tables = 0; // counts what may have brought new samples
  }

  tell(event) {
    this.clock_s = Math.max(this.clock_s, event.monotonic_s);
    this["on" + event.type]?.(event);
  }

  onRunStarted(event) {
    const rows = this.rows;
    this.reset();
    this.rows = rows;
    this.clock_s = event.monotonic_s;
  }

  onPhaseEntered({ phase, start_s, step }) {
    const open = this.phases.at(-1);
    if (open && open.end_s === null) open.end_s = start_s;
    this.phases.push({ name: phase, kind: "phase", start_s, end_s: null, step });
    this.phase = phase;
  }

  onIterationStarted({ step, monotonic_s }) {
    if (this.starts.at(-1)?.step === step) this.starts.pop(); // it begins again
    this.starts.push({ step, at_s: monotonic_s });
    if (this.starts.length > KEPT) {
      this.starts.splice(0, this.starts.length - KEPT);
      const from = this.starts[0].at_s;
      this.phases = this.phases.filter((span) => span.end_s === null || span.end_s > from);
      for (const [lane, spans] of this.lanes)
        this.lanes.set(
          lane,
          spans.filter((span) => (span.end_s ?? span.start_s) > from),
        );
    }
  }

  onIterationDone({ step, metrics }) {
    if (this.rows.length && this.rows.at(-1).step >= step) this.rows = this.rows.filter((row) => row.step < step);
    const kept = this.names ? Object.fromEntries(this.names.map((name) => [name, metrics[name] ?? null])) : metrics;
    this.rows.push({ step, metrics: kept });
    if (this.rows.length > MOST_ROWS) {
      const newest = this.rows.length - NEWEST_ROWS;
      this.rows = this.rows.filter((_, at) => at >= newest || at % 2 === 0);
    }
    this.tables += 1;
  }

  onUnitDone(event) {
    const { service, kind, unit, start_s, end_s, step, groups } = event;
    const text = groups.length ? `groups ${ranges(groups)}` : "";
    if (
      kind === "generate" &&
      event.decode_start_s !== null &&
      event.decode_start_s >= start_s &&
      event.decode_start_s <= end_s
    ) {
      this.span(service, { name: "prefill", kind: "prefill", start_s, end_s: event.decode_start_s, step, text });
      this.span(service, { name: "decode", kind: "decode", start_s: event.decode_start_s, end_s, step, text });
    } else {
      this.span(service, { name: `${kind.replaceAll("_", " ")} ${unit}`, kind, start_s, end_s, step, text });
    }
    if (kind === "suffix") this.trainer = service;
  }

  onGroupRewarded({ group, start_s, end_s, step, mean }) {
    this.span(REWARDS, {
      name: `reward of group ${group}`,
      kind: "reward",
      start_s,
      end_s,
      step,
      text: mean === null ? "" : `mean ${mean.toPrecision(3)}`,
    });
  }

  onUpdateCommitted({ start_s, end_s, step }) {
    this.span(this.trainer ?? "trainer[0:0]", {
      name: "optimizer step",
      kind: "optimizer",
      start_s,
      end_s,
      step,
      text: "",
    });
  }

  onServiceDied(event) {
    this.died = event;
    this.alarm ??= {
      what: `${event.service} died: ${event.how}`,
      phase: event.phase,
      step: event.step,
      service: event.service,
      log_path: event.log_path,
      wall_s: event.wall_s,
    };
  }

  // The run went on with the old program: what happened to the newcomer is in the notes.
  onSwapRefused({ role }) {
    if (this.died?.role !== role) return;
    this.died = null;
    if (this.alarm && !this.alarm.kind) this.alarm = null;
  }

  // The run goes on: what happened is in the journal, and the services' incarnations show it.
  onWorkersRestarted() {
    this.died = null;
    if (this.alarm && !this.alarm.kind) this.alarm = null;
  }

  onErrorRaised(event) {
    const { kind, what, got, needed, do: doing, where } = event.error;
    this.alarm = {
      kind,
      what,
      got,
      needed,
      do: doing,
      where,
      phase: event.phase,
      step: event.step,
      service: event.service,
      log_path: event.log_path,
      wall_s: event.wall_s,
    };
    if (this.died)
      this.alarm.how = `${this.died.service} (incarnation ${this.died.incarnation}, pid ${this.died.pid}): ${this.died.how}`;
  }

  onRunEnded({ exit_code, reason }) {
    this.ended = { exit_code, reason };
  }

  span(lane, span) {
    if (!this.lanes.has(lane)) this.lanes.set(lane, []);
    this.lanes.get(lane).push({ ...span, end_s: Math.max(span.start_s, span.end_s) });
  }

  // The last `count` iterations as a timeline; `now_s` ends what still goes on.
  timeline(count, now_s) {
    const starts = this.starts.slice(-count);
    const from = starts.length ? starts[0].at_s : (this.phases[0]?.start_s ?? now_s);
    const until = Math.max(...this.spans(from).map((span) => span.end_s ?? now_s), from + 1e-6);
    const moved = (span) => ({
      ...span,
      start_s: Math.max(0, span.start_s - from),
      end_s: (span.end_s ?? Math.max(now_s, span.start_s)) - from,
      open: span.end_s === null,
    });
    const inside = (spans) => spans.filter((span) => (span.end_s ?? now_s) > from).map(moved);
    return {
      steps: starts.map((start) => start.step),
      starts: starts.map((start) => ({ step: start.step, at_s: start.at_s - from })),
      seconds: until - from,
      phases: inside(this.phases),
      lanes: [...this.lanes].map(([name, spans]) => ({ name, spans: inside(spans) })),
    };
  }

  spans(from) {
    return [...this.phases, ...[...this.lanes.values()].flat()].filter(
      (span) => span.end_s === null || span.end_s > from,
    );
  }
}

export function ranges(numbers) {
  const parts = [];
  for (const one of numbers) {
    if (parts.length && one === parts.at(-1)[1] + 1) parts.at(-1)[1] = one;
    else parts.push([one, one]);
  }
  return parts.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");
}
