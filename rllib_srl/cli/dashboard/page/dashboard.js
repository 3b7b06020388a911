// Keeps the page up to date while the run goes on, shows values under a chart's pointer, and rates by keys.
"use strict";

const PAUSE_MS = 3000, LONGEST_PAUSE_MS = 30000;
const tab = document.body.dataset.tab;
let pause = PAUSE_MS;

if (new URLSearchParams(location.search).has("token")) {
  history.replaceState(null, "", location.pathname); // the cookie has it from here on
}

async function fetched(address) {
  const answer = await fetch(address, { signal: AbortSignal.timeout(60000) });
  if (!answer.ok) throw new Error(`${address}: ${answer.status}`);
  return answer;
}

async function renew(part) {
  const answer = await fetched(`/part/${part.dataset.part}`);
  const scrolled = [...part.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  part.innerHTML = await answer.text(); // escaped by the server; scripts in it would not run either
  part.dataset.version = answer.headers.get("x-version");
  part.querySelectorAll(".scroll").forEach((one, at) => { one.scrollLeft = scrolled[at] || 0; });
}

async function look() {
  const state = document.getElementById("state");
  try {
    const found = await (await fetched(`/pulse?tab=${tab}`)).json();
    state.textContent = found.state;
    for (const part of document.querySelectorAll("[data-part]")) {
      const version = found.versions[part.dataset.part];
      if (version !== undefined && version !== part.dataset.version) await renew(part);
    }
    const listed = document.querySelector("[data-listed]");
    if (listed && found.versions[tab] > Number(listed.dataset.listed)) document.getElementById("fresh").hidden = false;
    state.classList.remove("lost");
    pause = PAUSE_MS;
  } catch (error) {
    state.classList.add("lost");
    pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
  }
  setTimeout(whenSeen, pause);
}

function whenSeen() {
  if (!document.hidden) return look();
  document.addEventListener("visibilitychange", whenSeen, { once: true });
}

function shown(value, isShare) {
  return isShare ? `${(100 * value).toFixed(1)}%` : value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

function point(event) {
  const chart = event.target.closest && event.target.closest(".plot svg");
  if (!chart) return;
  const box = chart.getBoundingClientRect(), { left, right, low, high, share } = chart.dataset;
  const at = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
  const x = Number(low) + ((at - left) / (right - left)) * (high - low);
  const told = [];
  let nearest = null;
  for (const curve of chart.querySelectorAll("[data-points]")) {
    const points = JSON.parse(curve.dataset.points);
    if (!points.length) continue;
    const [px, py] = points.reduce((best, one) => (Math.abs(one[0] - x) < Math.abs(best[0] - x) ? one : best));
    nearest = px;
    told.push(`${curve.dataset.name} ${shown(py, share === "1")}`);
  }
  if (nearest === null) return;
  const line = chart.querySelector(".pointer"), px = Number(left) + ((nearest - low) / (high - low)) * (right - left);
  line.setAttribute("x1", px);
  line.setAttribute("x2", px);
  line.setAttribute("visibility", "visible");
  chart.parentElement.querySelector("output").textContent = `iteration ${shown(nearest, false)}: ${told.join(", ")}`;
}

document.addEventListener("pointermove", point);
document.addEventListener("pointerdown", point);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const button = document.querySelector(`form.rating button[data-key="${CSS.escape(event.key)}"]`);
  if (button && !button.disabled && !event.repeat) button.click();
});
for (const asked of document.querySelectorAll(".asked pre")) asked.scrollTop = asked.scrollHeight; // the question itself
for (const form of document.querySelectorAll("form.rating, form.once")) {
  form.addEventListener("submit", (event) => { // a second click does nothing
    if (form.dataset.isSent) event.preventDefault();
    form.dataset.isSent = "1";
  });
}
if (!["rate", "none"].includes(tab)) setTimeout(whenSeen, PAUSE_MS);
