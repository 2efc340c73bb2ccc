// Elements by hand: texts are always text, never markup.

export const byId = (id) => document.getElementById(id);

export function el(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// A table with heads for columns and rows. `numeric`: columns by number that are aligned right.
export function table({ caption, hidden = false, heads, rows, foot = null, numeric = [] }) {
  const cell = (tag, content, at, scope = null) =>
    el(tag, { scope, class: numeric.includes(at) ? "number" : null }, content);
  const line = (cells) =>
    el(
      "tr",
      {},
      cells.map((content, at) => (at === 0 ? cell("th", content, at, "row") : cell("td", content, at))),
    );
  return el(
    "div",
    { class: "wide", tabindex: "0", role: "region", "aria-label": caption },
    el(
      "table",
      {},
      el("caption", { class: hidden ? "visually-hidden" : null }, caption),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          heads.map((head, at) => cell("th", head, at, "col")),
        ),
      ),
      el("tbody", {}, rows.map(line)),
      foot ? el("tfoot", {}, line(foot)) : null,
    ),
  );
}

// Put new content in place of the old, unless it is the same text of markup: what has the focus keeps it.
export function show(place, ...children) {
  const next = el("div", {}, ...children);
  if (next.isEqualNode(place.shown ?? null)) return;
  place.shown = next.cloneNode(true);
  place.replaceChildren(...next.childNodes);
}

export const swatch = (kind, prefix) => el("span", { class: `swatch ${prefix}-${kind}`, "aria-hidden": "true" });
