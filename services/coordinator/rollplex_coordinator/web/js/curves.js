// Numbers over iterations, one small picture each, drawn by uPlot; several runs over one another where there are several.

import uPlot from "../vendor/uplot/uPlot.esm.js";
import { el } from "./dom.js";
import { number } from "./format.js";

export const CURVES = [
  { name: "reward", title: "Reward" },
  { name: "kl", title: "KL to the reference" },
  { name: "entropy", title: "Entropy" },
  { name: "completions/mean_length", title: "Response length", unit: "tokens" },
  { name: "sampling/sampling_logp_difference/mean", title: "Log-probability gap" },
  { name: "loss", title: "Loss" },
  { name: "time/step_s", title: "Time of an iteration", unit: "s" },
  { name: "time/prefix_in_window", title: "Hidden prefix work", unit: "share" },
];
export const NAMES = CURVES.map((curve) => curve.name);
const HEIGHT = 150;
const COLOURS = 6;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const lineColour = (at) => colour(`--c${at % COLOURS}`);

// Pictures in a place. `set` takes series: [{label, steps, values: {name: [...]}}], the same number each time or it is drawn anew.
export class Curves {
  constructor(place, key) {
    this.place = place;
    this.key = key;
    this.figures = new Map();
    this.series = [];
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  set(series) {
    const anew = series.length !== this.series.length || series.some((one, at) => one.label !== this.series[at].label);
    this.series = series;
    if (anew || !this.figures.size) this.redraw();
    else for (const curve of CURVES) this.update(curve);
  }

  redraw() {
    for (const figure of this.figures.values()) figure.plot.destroy();
    this.figures.clear();
    this.place.replaceChildren();
    this.place.classList.toggle("many", this.series.length > 1);
    if (this.series.length) for (const curve of CURVES) this.draw(curve);
  }

  draw(curve) {
    const value = el("b", {});
    const host = el("div", { class: "plot", role: "img" });
    this.place.append(
      el(
        "figure",
        { class: "curve", "data-name": curve.name },
        el(
          "figcaption",
          {},
          el("span", {}, curve.title, curve.unit ? el("span", { class: "soft" }, ` ${curve.unit}`) : null),
          value,
        ),
        host,
      ),
    );
    const axis = {
      stroke: colour("--soft"),
      font: "11px system-ui, sans-serif",
      grid: { stroke: colour("--grid"), width: 1 },
      ticks: { show: false },
    };
    const plot = new uPlot(
      {
        width: Math.max(180, host.clientWidth),
        height: HEIGHT,
        padding: [8, 8, 0, 0],
        scales: { x: { time: false } },
        axes: [
          { ...axis, size: 24, space: 60 },
          { ...axis, size: 50, space: 34, values: (_, found) => found.map(number) },
        ],
        series: [
          {},
          ...this.series.map((one, at) => ({
            label: one.label,
            stroke: lineColour(at),
            width: 1.6,
            spanGaps: true,
            points: { show: false },
          })),
        ],
        legend: { show: false },
        cursor: { sync: { key: this.key }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
        hooks: { setCursor: [(drawn) => this.tell(curve, drawn)] },
      },
      this.data(curve),
      host,
    );
    this.figures.set(curve.name, { plot, value, host });
    this.update(curve);
  }

  data(curve) {
    const tables = this.series.map((one) => [one.steps, one.values[curve.name] ?? one.steps.map(() => null)]);
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  update(curve) {
    const { plot, host } = this.figures.get(curve.name);
    plot.setData(this.data(curve));
    this.tell(curve, plot);
    const texts = this.series.map(
      (one) => `${one.label ? `${one.label}: ` : ""}${number(lastOf(one.values[curve.name]))}`,
    );
    host.setAttribute("aria-label", `${curve.title} over iterations, last ${texts.join("; ")}`);
  }

  // Beside the title: each run's value under the cursor, or its last one.
  tell(curve, plot) {
    const figure = this.figures.get(curve.name);
    if (!figure) return;
    const at = plot.cursor.idx ?? null;
    const texts = this.series.map((_, run) => number(lastOf(plot.data[run + 1], at)));
    const where = at === null ? "" : ` at ${plot.data[0][at]}`;
    const alone = texts.length === 1;
    figure.value.replaceChildren(
      ...texts.map((text, run) => el("span", { class: alone ? null : `c${run % COLOURS}` }, run ? ` ${text}` : text)),
      where,
    );
  }

  fit() {
    for (const { plot, host } of this.figures.values()) {
      const width = Math.max(180, host.clientWidth);
      if (Math.abs(width - plot.width) > 1) plot.setSize({ width, height: HEIGHT });
    }
  }
}

// The last value that there is, up to a place: runs that are drawn together were thinned differently.
const lastOf = (values = [], until = null) =>
  (until === null ? values : values.slice(0, until + 1)).findLast((one) => one !== null && one !== undefined) ?? null;
