// Where the run stands, as the coordinator says it: facts, what is waited for, services, replacements and trackers.

import { byId, el, show, table } from "./dom.js";
import { plural, seconds } from "./format.js";

export function drawGoal(status) {
  byId("goal-done").textContent = status.iterations_done;
  byId("goal-wanted").textContent = status.iterations_wanted;
  byId("goal").max = Math.max(1, status.iterations_wanted);
  byId("goal").value = status.iterations_done;
}

export function drawFacts(place, status) {
  const facts = [
    ["Iteration", status.step],
    ["Weights version", status.version],
    ["Schedule", status.schedule],
    ["Up for", seconds(Date.now() / 1e3 - status.started_wall_s)],
  ];
  for (const gpu of status.gpus) facts.push([status.gpus.length > 1 ? `GPU of ${gpu.device}` : "GPU", gpu.name]);
  if (status.gpu) {
    const why = status.gpu.why ? ` (${status.gpu.why})` : "";
    facts.push(["Shared by", status.gpu.sharing_used + why]);
  }
  if (status.stopping) facts.push(["Stopping", status.stopping.replaceAll("_", " ")]);
  show(
    place,
    facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))),
  );
}

export function drawWaits(place, waiting) {
  if (!waiting.length) {
    show(place, el("p", { class: "none" }, "Nothing."));
    return;
  }
  const rows = waiting.map((wait) => [wait.for, wait.from, seconds(wait.age_s), seconds(wait.deadline_s)]);
  const heads = ["what", "from", "for", "deadline"];
  show(place, table({ caption: "What the coordinator waits for", hidden: true, heads, rows, numeric: [2, 3] }));
}

export function drawServices(place, services) {
  const state = (one) =>
    el("span", { class: "state", "data-state": one.state, title: one.log_path || null }, one.state);
  const heard = (one) => (one.heard_age_s === null ? "–" : `${seconds(one.heard_age_s)} ago`);
  const rows = services.map((one) => [
    one.service,
    state(one),
    String(one.incarnation),
    String(one.pid || "–"),
    heard(one),
  ]);
  const heads = ["service", "state", "incarnation", "pid", "heard"];
  show(place, table({ caption: "Service processes", hidden: true, heads, rows, numeric: [2, 3, 4] }));
}

export function drawNotes(place, { swap, trackers = [] }) {
  const told = trackers.filter((one) => one.state === "failed" || one.dropped_rows).map(tracker);
  show(place, swap ? replacement(swap) : null, told);
}

function tracker({ name, state, detail, dropped_rows }) {
  const lost = dropped_rows ? ` (${plural(dropped_rows, "row", "rows")} left out)` : "";
  return el("p", { class: state === "failed" ? "bad" : "soft" }, `Tracker ${name} ${state}: ${detail}${lost}`);
}

function replacement({ role, command, state, case: at, got, needed, step }) {
  const why = [` at ${at}`, got && `got ${got}`, needed && `needed ${needed}`].filter(Boolean).join("; ");
  const since = state === "swapped" && step !== null ? `, from iteration ${step} on` : "";
  return el(
    "p",
    { class: state === "refused" ? "bad" : "soft" },
    `Replacement of ${role}: ${state}${state === "refused" ? why : since} `,
    el("code", {}, command.join(" ")),
  );
}
