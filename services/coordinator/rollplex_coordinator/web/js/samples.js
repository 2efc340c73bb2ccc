// Samples: a prompt with its pictures, and the responses with rewards. A picture opens large in a dialog.

import { picture } from "./api.js";
import { byId, el, table } from "./dom.js";
import { number } from "./format.js";

const SMALL = 64; // pixels: smaller pictures are enlarged pixel by pixel

// run, attempt: whose they are. Gives elements, to be put where they belong.
export const sampleElements = (samples, run, attempt) => samples.map((sample) => one(sample, run, attempt));

function one(sample, run, attempt) {
  const name = `Step ${sample.step}, row ${sample.row}, group ${sample.group}`;
  return el(
    "article",
    { class: "sample", "aria-label": name },
    el("h3", {}, name),
    el(
      "div",
      { class: "asked" },
      sample.pictures.length
        ? el(
            "ul",
            { class: "pictures", "aria-label": "Pictures" },
            sample.pictures.map((item) => thumbnail(item, sample, run, attempt)),
          )
        : null,
      el(
        "div",
        { class: "answers" },
        sample.left_out ? el("p", { class: "soft" }, `and ${sample.left_out} more pictures`) : null,
        sample.missing
          ? el("p", { class: "bad" }, `Prompt and pictures are not shown: ${sample.missing}`)
          : el(
              "pre",
              { class: "text prompt", tabindex: "0", dir: "auto", role: "region", "aria-label": `Prompt of ${name}` },
              sample.prompt,
            ),
        sample.skipped ? el("p", { class: "bad" }, `Left out: ${sample.skipped}`) : responses(sample),
      ),
    ),
  );
}

function responses(sample) {
  const functions = Object.keys(sample.responses[0]?.rewards ?? {});
  const rows = sample.responses.map((item) => [
    el(
      "pre",
      { class: "text answer", dir: "auto" },
      visible(item.text) + (item.more_characters ? `… and ${item.more_characters} more characters` : ""),
    ),
    el(
      "span",
      { class: item.advantage > 0 ? "good" : item.advantage < 0 ? "bad" : null },
      item.advantage > 0 ? `+${number(item.advantage)}` : number(item.advantage),
    ),
    number(item.reward),
    ...(functions.length > 1 ? functions.map((name) => number(item.rewards[name])) : []),
    `${item.tokens}${item.stopped ? "" : " cut"}`,
  ]);
  const heads = ["response", "advantage", "reward", ...(functions.length > 1 ? functions : []), "tokens"];
  return el(
    "div",
    {},
    table({
      caption: `Responses of group ${sample.group} of step ${sample.step}`,
      hidden: true,
      heads,
      rows,
      numeric: heads.map((_, at) => at).slice(1),
    }),
    sample.more_responses ? el("p", { class: "soft" }, `and ${sample.more_responses} more responses`) : null,
  );
}

// Control characters are shown by their pictures.
const visible = (text) =>
  text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (one) => String.fromCharCode(0x2400 + one.charCodeAt(0)));

function thumbnail(item, sample, run, attempt) {
  if (item.index === null) return el("li", { class: "soft" }, `${item.name} is not shown: ${item.problem}`);
  const small = Math.max(item.width, item.height) <= SMALL ? "pixels" : null;
  const said = `${item.name} of row ${sample.row}`;
  const image = el("img", { alt: said, class: small, width: 84, height: 84 });
  const path = `runs/${encodeURIComponent(run)}/samples/${sample.step}/${sample.group}/${item.index}?attempt=${attempt}`;
  picture(path).then(
    (address) => {
      image.src = address;
    },
    (error) => {
      image.alt = `${said}: ${error.message}`;
    },
  );
  return el(
    "li",
    {},
    el(
      "button",
      {
        type: "button",
        "aria-label": `Open ${said} of step ${sample.step}`,
        onclick: () => open(path, said, sample, small),
      },
      image,
    ),
  );
}

async function open(path, said, sample, small) {
  const dialog = byId("viewer");
  byId("viewer-title").textContent = `${said}, step ${sample.step}`;
  byId("viewer-picture").replaceChildren(el("img", { alt: said, class: small, src: await picture(path) }));
  dialog.showModal();
}
