// Requests to the coordinator. The token lives in this module's variable and nowhere else: no storage, cookie or address.

let token = null;

export class ApiError extends Error {
  constructor(status, view) {
    super(
      [view.what, view.got && `got ${view.got}`, view.needed && `needed ${view.needed}`, view.do]
        .filter(Boolean)
        .join("; "),
    );
    this.status = status;
    this.view = view;
  }
}

export const setToken = (value) => {
  token = value;
};
export const hasToken = () => token !== null;

const headers = (more = {}) => ({ Authorization: `Bearer ${token}`, ...more });

// Repeated for lists; null and "" are left out.
export function query(parameters) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") found.append(name, one);
    }
  }
  const text = found.toString();
  return text ? `?${text}` : "";
}

async function answered(path, options) {
  const response = await fetch(path, { cache: "no-store", credentials: "omit", redirect: "error", ...options });
  if (response.ok) return response;
  let view = { what: `the coordinator answered with status ${response.status}` };
  try {
    view = (await response.json()).error ?? view;
  } catch {
    // not one of its own answers: the status says what there is to say
  }
  throw new ApiError(response.status, view);
}

export async function get(path, parameters = {}, signal = undefined) {
  return (await answered(path + query(parameters), { headers: headers(), signal })).json();
}

export async function post(path, body) {
  const options = {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
  };
  return (await answered(path, options)).json();
}

const pictures = new Map();
const MOST_PICTURES = 300; // a page may stay open for days: the oldest are given up, and fetched again if opened

// A picture as an address of this page: an <img> cannot send the token.
export async function picture(path) {
  if (!pictures.has(path)) {
    const blob = await (await answered(path, { headers: headers() })).blob();
    if (!pictures.has(path)) pictures.set(path, URL.createObjectURL(blob));
    if (pictures.size > MOST_PICTURES) {
      const [oldest, address] = pictures.entries().next().value;
      pictures.delete(oldest);
      URL.revokeObjectURL(address);
    }
  }
  return pictures.get(path);
}

export function forget() {
  token = null;
  for (const address of pictures.values()) URL.revokeObjectURL(address);
  pictures.clear();
}

// The events after an id, or the newest `last`, for as long as the stream goes. Gives lists of {type, id, …}.
export async function* events({ after, last, signal }) {
  const parameters = after === null ? { last } : { after };
  const response = await answered("events" + query(parameters), { headers: headers(), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    const found = frames.map(parsed).filter((event) => event !== null);
    yield found;
  }
}

function parsed(frame) {
  const data = frame
    .split("\n")
    .filter((line) => line.startsWith("data: "))
    .map((line) => line.slice(6))
    .join("\n");
  if (!data) return null;
  const { id, wall_s, monotonic_s, step, event } = JSON.parse(data);
  return { ...event, id, wall_s, monotonic_s, at_step: step };
}
