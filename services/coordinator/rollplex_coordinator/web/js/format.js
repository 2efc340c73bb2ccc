// Numbers and times as people read them. Pure.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let value = count;
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value : value.toFixed(value < 10 ? 2 : 1)} ${UNITS[unit]}`;
}

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(1);
  return String(Number(value.toPrecision(size >= 1000 ? 5 : 4)));
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1e3).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 6000) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function when(wallSeconds) {
  if (wallSeconds === null || wallSeconds === undefined) return "–";
  return new Date(wallSeconds * 1e3).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

export function clock(wallSeconds) {
  return new Date(wallSeconds * 1e3).toLocaleTimeString();
}

export const words = (kind) => kind.replaceAll("_", " ").replaceAll(" kv", " K/V");

export const plural = (count, one, many) => `${count} ${count === 1 ? one : many}`;
