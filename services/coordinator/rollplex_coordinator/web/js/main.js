// The page: who is logged in, and which view is shown. The address says the view, never the token.

import { ApiError, forget, get, hasToken, setToken } from "./api.js";
import { byId } from "./dom.js";
import { History } from "./history.js";
import { Live } from "./live.js";

const live = new Live();
const history = new History();
let hasRun = true; // false: this server shows past runs only

function showLogin(text = "") {
  byId("bar").hidden = byId("live").hidden = byId("history").hidden = true;
  byId("login").hidden = false;
  byId("login-error").textContent = text;
  byId("token").value = "";
  byId("token").focus();
}

async function login(event) {
  event.preventDefault();
  const token = byId("token").value.trim();
  if (!/^[\x21-\x7e]+$/.test(token)) return showLogin("A token is one word of plain characters.");
  setToken(token);
  try {
    hasRun = (await get("runs")).some((run) => run.current);
  } catch (error) {
    forget();
    if (error instanceof ApiError && error.status === 401)
      return showLogin("This is not the run's token. It is in the file “token” of the run directory.");
    return showLogin(error instanceof ApiError ? error.message : "The coordinator does not answer.");
  }
  byId("login").hidden = true;
  byId("token").value = "";
  byId("bar").hidden = false;
  byId("to-live").hidden = !hasRun;
  byId("link").hidden = !hasRun;
  if (hasRun) live.start();
  await route();
  byId("main").focus();
}

function logout() {
  live.end();
  history.end();
  forget();
  showLogin();
}

async function route() {
  if (!hasToken()) return;
  const [view, ...rest] = location.hash.slice(1).split("/");
  const past = !hasRun || view === "history";
  byId("live").hidden = past;
  byId("history").hidden = !past;
  for (const [id, on] of [
    ["to-live", !past],
    ["to-history", past],
  ]) {
    if (on) byId(id).setAttribute("aria-current", "page");
    else byId(id).removeAttribute("aria-current");
  }
  document.title = past ? "History – Rollplex" : "Live – Rollplex";
  if (!past) return;
  const attempt = rest.pop();
  try {
    await history.open(rest.length ? `${decodeURIComponent(rest.join("/"))}/${attempt}` : null);
  } catch (error) {
    byId("runs").textContent = error instanceof ApiError ? error.message : "The coordinator does not answer.";
  }
}

byId("login-form").addEventListener("submit", login);
byId("logout").addEventListener("click", logout);
addEventListener("hashchange", route);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
showLogin();
