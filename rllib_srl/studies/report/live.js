// Keeps a page up to date while its run goes on.
"use strict";

const PAUSE_MS = 3000, LONGEST_PAUSE_MS = 30000;
const live = document.querySelector("[data-live]");
let pause = PAUSE_MS, etag = "";

if (new URLSearchParams(location.search).has("token")) {
  history.replaceState(null, "", location.pathname); // the cookie has it from here on
}

async function look() {
  try {
    const how = { headers: { "If-None-Match": etag }, signal: AbortSignal.timeout(60000) };
    const answer = await fetch(location.pathname, how);
    if (answer.status === 200) {
      const page = new DOMParser().parseFromString(await answer.text(), "text/html"); // runs no scripts
      renew(page.querySelector("[data-live]"));
      etag = answer.headers.get("etag");
    } else if (answer.status !== 304) {
      throw new Error(`${location.pathname}: ${answer.status}`);
    }
    live.classList.remove("lost");
    pause = PAUSE_MS;
  } catch (error) {
    live.classList.add("lost");
    pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
  }
  setTimeout(whenSeen, pause);
}

function renew(next) {
  if (live.innerHTML === next.innerHTML) return;
  const scrolled = [...live.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
  const open = [...live.querySelectorAll("details")].map((one) => one.open);
  live.replaceChildren(...next.childNodes);
  live.querySelectorAll(".scroll").forEach((one, at) => { one.scrollLeft = scrolled[at] || 0; });
  live.querySelectorAll("details").forEach((one, at) => { one.open = open[at] || false; });
}

function whenSeen() {
  if (!document.hidden) return look();
  document.addEventListener("visibilitychange", whenSeen, { once: true });
}

setTimeout(whenSeen, PAUSE_MS);
