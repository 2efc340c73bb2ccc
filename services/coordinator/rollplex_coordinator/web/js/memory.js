// Leases by kind against the budget of each device. The sums are those of the ledger.

import { el, show, svg, swatch, table } from "./dom.js";
import { bytes, plural, words } from "./format.js";

const KINDS = [
  "actor_weights",
  "reference_weights",
  "gradients",
  "optimizer_state",
  "rollout_kv",
  "reference_prefix_kv",
  "actor_prefix_kv",
  "prefix_activations",
  "inputs",
  "workspace",
  "overhead",
];

// Pure: what a ledger says of one device, by kind in a fixed order.
export function byKind(ledger, device) {
  const sums = new Map();
  for (const lease of ledger.leases.filter((one) => one.device === device)) {
    const sum = sums.get(lease.kind) ?? { kind: lease.kind, leases: 0, size: 0, held: 0, measured: true };
    sum.leases += 1;
    sum.size += lease.size_bytes;
    sum.held += lease.held_bytes ?? 0;
    sum.measured &&= lease.held_bytes !== null;
    sums.set(lease.kind, sum);
  }
  const rank = (kind) => (KINDS.includes(kind) ? KINDS.indexOf(kind) : KINDS.length);
  return [...sums.values()].sort((a, b) => rank(a.kind) - rank(b.kind));
}

export function drawMemory(place, ledger) {
  if (!ledger.devices.length) {
    show(place, el("p", { class: "none" }, "No lease yet: memory is planned while the node loads."));
    return;
  }
  show(
    place,
    ledger.devices.map((budget) =>
      device(
        budget,
        byKind(ledger, budget.device),
        ledger.waiting.filter((one) => one.device === budget.device),
      ),
    ),
  );
}

function device(budget, kinds, waiting) {
  const sum = kinds.reduce((total, one) => total + one.size, 0);
  const held = kinds.some((one) => one.measured);
  const cells = (one) => [
    el("span", {}, swatch(classOf(one.kind), "m"), ` ${words(one.kind)}`),
    String(one.leases),
    bytes(one.size),
    ...(held ? [one.measured ? bytes(one.held) : "–"] : []),
  ];
  const small = Math.max(budget.peak_bytes, sum) < budget.budget_bytes / 4;
  const against = Math.max(small ? budget.peak_bytes : budget.budget_bytes, sum, 1);
  return el(
    "div",
    { class: "device", "data-device": budget.device, "data-sum-bytes": sum, "data-leased-bytes": budget.leased_bytes },
    el(
      "h3",
      {},
      el("span", {}, `Device ${budget.device}`),
      el("span", {}, `${bytes(budget.leased_bytes)} of ${bytes(budget.budget_bytes)} leased`),
    ),
    small ? thin(budget, sum) : null,
    small ? el("p", { class: "label" }, "by kind, against the peak") : null,
    bar(budget, kinds, sum, against),
    table({
      caption: `Leases of device ${budget.device} by kind`,
      hidden: true,
      heads: ["kind", "leases", "leased", ...(held ? ["measured"] : [])],
      rows: kinds.map(cells),
      foot: ["all", String(kinds.reduce((total, one) => total + one.leases, 0)), bytes(sum), ...(held ? [""] : [])],
      numeric: [1, 2, 3],
    }),
    el(
      "p",
      { class: "soft" },
      `Peak ${bytes(budget.peak_bytes)}${budget.reserved_bytes ? `; set aside for this phase ${bytes(budget.reserved_bytes)}` : ""}.`,
    ),
    waiting.length
      ? el(
          "p",
          {},
          `${plural(waiting.length, "request waits", "requests wait")} for memory: `,
          waiting.map((one) => `${words(one.kind)} of ${one.owner}, ${bytes(one.size_bytes)}`).join("; "),
        )
      : null,
  );
}

const classOf = (kind) => (KINDS.includes(kind) ? kind : "other");
const share = (count, whole) => `${Math.min(100, (100 * count) / whole)}%`;

// The whole budget, where what is leased is too little of it to be seen by kind.
function thin(budget, sum) {
  return svg(
    "svg",
    { class: "stack thin", role: "img", "aria-label": `${bytes(sum)} of ${bytes(budget.budget_bytes)}` },
    svg("rect", { class: "all", width: share(sum, budget.budget_bytes), height: 8 }),
    peak(budget, budget.budget_bytes, 8),
  );
}

const peak = (budget, whole, height) =>
  svg(
    "line",
    { class: "peak", x1: share(budget.peak_bytes, whole), x2: share(budget.peak_bytes, whole), y1: 0, y2: height },
    svg("title", {}, `peak: ${bytes(budget.peak_bytes)}`),
  );

function bar(budget, kinds, sum, whole) {
  let at = 0;
  const parts = kinds.map((one) => {
    const part = svg(
      "rect",
      {
        class: `m-${classOf(one.kind)}`,
        "data-kind": one.kind,
        "data-bytes": one.size,
        x: share(at, whole),
        y: 0,
        width: share(one.size, whole),
        height: 26,
      },
      svg("title", {}, `${words(one.kind)}: ${bytes(one.size)}`),
    );
    at += one.size;
    return part;
  });
  const reserved = Math.max(0, Math.min(budget.reserved_bytes, whole - at));
  if (reserved)
    parts.push(
      svg(
        "rect",
        { class: "reserved", x: share(at, whole), y: 0, width: share(reserved, whole), height: 26 },
        svg("title", {}, `set aside: ${bytes(budget.reserved_bytes)}`),
      ),
    );
  parts.push(peak(budget, whole, 26));
  return svg(
    "svg",
    {
      class: "stack",
      role: "img",
      "aria-label": `${bytes(sum)} of ${bytes(budget.budget_bytes)} leased; by kind in the table below`,
    },
    parts,
  );
}
