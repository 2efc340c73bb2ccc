// A timeline: phases above, a lane for each service, as SVG; beside it the same as a table of seconds.

import { el, show, svg, swatch, table } from "./dom.js";
import { seconds } from "./format.js";

const KINDS = {
  prefill: "prefill",
  decode: "decode",
  generate: "rollout",
  reference_prefix: "reference prefix",
  actor_prefix: "actor prefix",
  score: "score",
  suffix: "suffix forward, backward",
  prefix_backward: "prefix backward",
  vote: "sum and vote",
  optimizer: "optimizer step",
  reward: "rewards",
};
const SHORT = {
  reference_prefix: "reference",
  actor_prefix: "actor",
  suffix: "suffix",
  prefix_backward: "backward",
  vote: "vote",
  optimizer: "optimizer",
  reward: "reward",
};
const ORDER = ["rollout", "prefix", "trainer", "rewards"];
const LANE = 30,
  GAP = 8,
  PHASE = 22,
  TOP = 22,
  LABEL = 4;
const NARROW = 560; // pixels: names stand above their lanes

const roleOf = (name) => name.split("[")[0];
const rank = (name) => {
  const at = ORDER.indexOf(roleOf(name));
  return at < 0 ? ORDER.length : at;
};
const width = (text) => text.length * 6.6 + 2 * LABEL;

// timeline: {steps, starts?, seconds, phases, lanes}; as `story.timeline` and GET /runs/{run}/timeline give it.
export function drawLanes(place, timeline) {
  if (!timeline.phases.length && !timeline.lanes.length) {
    show(place, el("p", { class: "none" }, "No iteration yet."));
    return;
  }
  const lanes = [...timeline.lanes]
    .filter((lane) => lane.spans.some((span) => kindOf(span)))
    .sort((a, b) => rank(a.name) - rank(b.name) || a.name.localeCompare(b.name, "en", { numeric: true }));
  const alone = new Map();
  for (const lane of lanes) alone.set(roleOf(lane.name), (alone.get(roleOf(lane.name)) ?? 0) + 1);
  const named = lanes.map((lane) => ({
    ...lane,
    label: alone.get(roleOf(lane.name)) === 1 ? roleOf(lane.name) : lane.name,
  }));
  const opened = place.querySelector("details")?.open ?? false;
  place.shown = null;
  place.replaceChildren(picture(place, timeline, named), legend(named), asTable(timeline, named, opened));
}

const kindOf = (span) => (span.kind in KINDS ? span.kind : null);

function picture(place, timeline, lanes) {
  const whole = Math.max(260, place.clientWidth);
  const narrow = whole < NARROW;
  const left = narrow ? 0 : Math.max(64, ...lanes.map((lane) => lane.label.length * 7 + 12));
  const x = (at) => left + (Math.min(Math.max(at, 0), timeline.seconds) / timeline.seconds) * (whole - left - 1);
  const step = LANE + GAP + (narrow ? 15 : 0);
  const top = TOP + PHASE + GAP + (narrow ? 15 : 0);
  const bottom = top + lanes.length * step;
  const height = bottom + 20;
  const parts = [...windows(timeline, lanes, { x, top, step }), ...grid(timeline, { x, left, whole, bottom })];
  parts.push(...phases(timeline, x), ...iterations(timeline, { x, bottom }));
  lanes.forEach((lane, at) => {
    const y = top + at * step;
    parts.push(
      svg(
        "text",
        narrow ? { class: "name", x: 0, y: y - 4 } : { class: "name end", x: left - 10, y: y + LANE / 2 + 4 },
        lane.label,
      ),
    );
    parts.push(
      svg("rect", {
        class: "lane",
        x: left + 0.5,
        y: y + 0.5,
        width: Math.max(0, whole - left - 1),
        height: LANE - 1,
        rx: 3,
      }),
    );
    parts.push(...boxes(lane.spans, y, x));
  });
  const said = `Timeline of ${said_steps(timeline.steps)}, ${seconds(timeline.seconds)}. Lanes: ${lanes.map((lane) => lane.label).join(", ") || "none"}. The same as a table below.`;
  return svg(
    "svg",
    { class: "lanes", role: "img", "aria-label": said, width: whole, height, viewBox: `0 0 ${whole} ${height}` },
    parts,
  );
}

const said_steps = (steps) =>
  steps.length === 0
    ? "the start"
    : steps.length === 1
      ? `iteration ${steps[0]}`
      : `iterations ${steps[0]} to ${steps.at(-1)}`;

// The window, in which prefix work is hidden behind sampling: a band behind rollout and prefix.
function windows(timeline, lanes, { x, top, step }) {
  const rows = lanes
    .map((lane, at) => (["rollout", "prefix"].includes(roleOf(lane.name)) ? at : -1))
    .filter((at) => at >= 0);
  if (!rows.length) return [];
  return timeline.phases
    .filter((span) => span.name === "ROLLOUT")
    .map((span) =>
      svg("rect", {
        class: "window",
        x: x(span.start_s),
        y: top + rows[0] * step - GAP / 2,
        width: Math.max(0, x(span.end_s) - x(span.start_s)),
        height: (rows.at(-1) - rows[0]) * step + LANE + GAP,
      }),
    );
}

function grid(timeline, { x, left, whole, bottom }) {
  const wanted = timeline.seconds / Math.max(2, Math.round((whole - left) / 110));
  const power = 10 ** Math.floor(Math.log10(Math.max(wanted, 1e-9)));
  const tick = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= wanted) ?? power;
  const parts = [];
  for (let at = 0; at <= timeline.seconds; at += tick) {
    const text = seconds(at);
    parts.push(svg("line", { class: "grid", x1: x(at), x2: x(at), y1: TOP, y2: bottom }));
    if (x(at) + width(text) / 2 < whole)
      parts.push(
        svg("text", { class: `name${at === 0 ? "" : " mid"}`, x: x(at), y: bottom + 14 }, at === 0 ? "0" : text),
      );
  }
  return parts;
}

const SHADES = { ROLLOUT: 1, SCORE: 2, TRAIN: 1, UPDATE: 2 };

function phases(timeline, x) {
  return timeline.phases
    .filter((span) => span.name !== "IDLE")
    .flatMap((span) => {
      const [from, to] = [x(span.start_s), x(span.end_s)];
      const box = svg(
        "rect",
        {
          class: `phase-${SHADES[span.name] ?? 1}`,
          x: from,
          y: TOP,
          width: Math.max(0.7, to - from),
          height: PHASE,
          rx: 2,
        },
        title(span),
      );
      const name = span.name.toLowerCase();
      return width(name) <= to - from ? [box, svg("text", { x: from + LABEL, y: TOP + 15 }, name)] : [box];
    });
}

function iterations(timeline, { x, bottom }) {
  const starts =
    timeline.starts ??
    [
      ...new Map(timeline.phases.filter((span) => span.name === "ROLLOUT").map((span) => [span.step, span])).values(),
    ].map((span) => ({ step: span.step, at_s: span.start_s }));
  return starts.flatMap((start, at) => {
    const [from, to] = [x(start.at_s), at + 1 < starts.length ? x(starts[at + 1].at_s) : Infinity];
    const line = svg("line", { class: "cut", x1: from, x2: from, y1: 4, y2: bottom });
    const name = [`iteration ${start.step}`, `${start.step}`].find((text) => width(text) <= to - from);
    return name ? [line, svg("text", { class: "name", x: from + LABEL, y: 14 }, name)] : [line];
  });
}

// Spans that overlap share the lane's height.
function boxes(spans, y, x) {
  const ends = [];
  const placed = [...spans]
    .filter((span) => span.end_s !== null && kindOf(span))
    .sort((a, b) => a.start_s - b.start_s)
    .map((span) => {
      let row = ends.findIndex((end) => end <= span.start_s + 1e-9);
      if (row < 0) row = ends.length;
      ends[row] = span.end_s;
      return { span, row };
    });
  const height = LANE / Math.max(1, ends.length);
  const parts = placed.flatMap(({ span, row }) => {
    const [from, to] = [x(span.start_s), x(span.end_s)];
    const box = svg(
      "rect",
      {
        class: `k-${kindOf(span)}`,
        x: from,
        y: y + row * height,
        width: Math.max(0.7, to - from),
        height: Math.max(1, height - (height > 4 ? 0.5 : 0)),
        rx: Math.min(2, height / 3),
      },
      title(span),
    );
    const short = [KINDS[span.kind], SHORT[span.kind]].find((text) => text && width(text) <= to - from);
    return height >= 14 && short
      ? [box, svg("text", { class: "inside", x: from + LABEL, y: y + row * height + height / 2 + 4 }, short)]
      : [box];
  });
  return parts;
}

const title = (span) =>
  svg("title", {}, `${span.name}${span.text ? `, ${span.text}` : ""}: ${seconds(span.end_s - span.start_s)}`);

function legend(lanes) {
  const there = new Set(lanes.flatMap((lane) => lane.spans.map((span) => span.kind)));
  return el(
    "ul",
    { class: "legend", "aria-label": "Colours" },
    Object.entries(KINDS)
      .filter(([kind]) => there.has(kind))
      .map(([kind, text]) => el("li", {}, swatch(kind, "k"), text)),
  );
}

function asTable(timeline, lanes, open) {
  const sums = new Map();
  for (const lane of lanes) {
    for (const span of lane.spans.filter((one) => one.end_s !== null && kindOf(one))) {
      const key = `${lane.label}\n${KINDS[span.kind]}`;
      const sum = sums.get(key) ?? { count: 0, took: 0 };
      sums.set(key, { count: sum.count + 1, took: sum.took + span.end_s - span.start_s });
    }
  }
  const rows = [...sums].map(([key, { count, took }]) => [...key.split("\n"), String(count), seconds(took)]);
  return el(
    "details",
    { open },
    el("summary", {}, "As a table"),
    table({
      caption: `Work of ${said_steps(timeline.steps)}`,
      heads: ["service", "work", "units", "time"],
      rows,
      numeric: [2, 3],
    }),
  );
}
