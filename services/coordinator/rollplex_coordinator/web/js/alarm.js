// An error, told whole: what happened, what was got, what was needed, what to do, where, which log.

import { byId, el, show } from "./dom.js";
import { clock } from "./format.js";

const LINES = [
  ["got", "Got"],
  ["needed", "Needed"],
  ["do", "Do"],
  ["how", "Process"],
  ["where", "Where"],
  ["place", "In the run"],
  ["log_path", "Log"],
];

export function alarmElement(error, title) {
  const place = [
    error.phase && `phase ${error.phase}`,
    error.step !== null && error.step !== undefined && `step ${error.step}`,
  ]
    .filter(Boolean)
    .join(", ");
  const found = { ...error, place };
  return [
    el("h2", {}, title ?? error.what),
    title ? el("p", {}, error.what) : null,
    el(
      "dl",
      {},
      LINES.filter(([name]) => found[name]).flatMap(([name, label]) => [
        el("dt", {}, label),
        el("dd", {}, String(found[name])),
      ]),
    ),
  ];
}

// The page's own place for what cannot be overlooked; null: nothing.
export function showAlarm(error, ended) {
  const place = byId("alarm");
  if (error === null) {
    place.hidden = true;
    return;
  }
  const name = error.service ? `${error.service}: ` : "";
  const title = `${name}${error.kind ?? "a service died"}${error.wall_s ? `, ${clock(error.wall_s)}` : ""}`;
  show(
    place,
    alarmElement(error, title),
    ended ? el("p", {}, `The run has ended with exit code ${ended.exit_code}.`) : null,
  );
  place.hidden = false;
}
