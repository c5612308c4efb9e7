// What the pages share: which one is shown, the colours, the API key, and the engine's pulse in the header.

import { apiKey } from "./api.js";
import { startChat } from "./chat.js";
import { announce, byId } from "./dom.js";
import { startEngine } from "./engine.js";
import { live } from "./live.js";
import { drawLine } from "./sparkline.js";

const PAGES = ["chat", "engine"];
const THEMES = { "": "as the system", light: "light", dark: "dark" };
const THEME = "xllm-npu.theme";
const TAPE = 60;

function showPage() {
  const asked = location.hash.slice(1);
  const page = PAGES.includes(asked) ? asked : "chat";
  for (const name of PAGES) byId(name).hidden = name !== page;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === page) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = page === "chat" ? "xllm-npu" : "Engine, xllm-npu";
  engine.draw();
}

function showTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  byId("theme-name").textContent = `Colours: ${THEMES[name]}`;
  byId("theme").title = `Colours: ${THEMES[name]}`;
}

function nextTheme() {
  const names = Object.keys(THEMES);
  const name = names[(names.indexOf(localStorage.getItem(THEME) || "") + 1) % names.length];
  localStorage.setItem(THEME, name);
  showTheme(name);
  announce(`Colours: ${THEMES[name]}`);
  drawTape();
  engine.draw();
}

function showKey(shown) {
  byId("key-box").hidden = !shown;
  byId("key-button").setAttribute("aria-expanded", String(shown));
  if (shown) byId("key").focus();
}

function useKey(event) {
  event.preventDefault();
  apiKey.set(byId("key").value.trim());
  showKey(false);
  byId("key-button").focus();
  live.schedule(0);
  chat.loadModels();
}

function drawTape() {
  const text = byId("tape-text");
  if (live.failure) {
    text.textContent = live.failure.status === 401 ? "API key needed" : "no connection";
    byId("tape").dataset.state = "lost";
    return;
  }
  if (!live.state) return;
  byId("tape").dataset.state = "live";
  const rate = live.total("generation");
  const waiting = live.total("waiting");
  text.textContent = `${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s, ${live.total("running")} running${waiting ? `, ${waiting} waiting` : ""}`;
  drawLine(byId("tape-line"), live.totals("generation").slice(-TAPE), { length: TAPE });
}

showTheme(localStorage.getItem(THEME) || "");
const chat = startChat(() => showKey(true));
const engine = startEngine();
byId("theme").addEventListener("click", nextTheme);
byId("key-button").addEventListener("click", () => showKey(byId("key-box").hidden));
byId("key-box").addEventListener("submit", useKey);
byId("key").value = apiKey.get();
live.listeners.add(drawTape);
window.addEventListener("hashchange", () => {
  showPage();
  byId("main").focus({ preventScroll: true });
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawTape(); engine.draw(); });
showPage();
live.start();
if (window.matchMedia("(min-width: 600px)").matches) byId("draft").focus();
