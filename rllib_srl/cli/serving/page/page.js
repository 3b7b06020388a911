// The page of a served model: asks, shows, rates, and follows the versions, all through the gateway's own addresses.
"use strict";

const POLL_MS = 2000, LONGEST_PAUSE_MS = 30000, TIMEOUT_MS = 60000, ROLLBACK_MS = 900000, NAME = "srl rater";
const by = (id) => document.getElementById(id);
const now = { status: null, seen: null, messages: [], answers: [], undo: [], answering: null, before: null, versions: [] };

if (location.search) history.replaceState(null, "", location.pathname + location.hash); // the cookie has the token

function make(tag, text = "", attributes = {}, ...children) {
  const one = document.createElement(tag);
  one.textContent = text; // never markup
  for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
  one.append(...children);
  return one;
}

function button(text, action, attributes = {}) {
  const one = make("button", text, { type: "button", ...attributes });
  one.addEventListener("click", action);
  return one;
}

async function checked(answer) {
  if (answer.ok) return answer;
  let why = `the server answered with status ${answer.status}`;
  try { why = (await answer.json()).error.message; } catch { /* it is not the gateway's own answer */ }
  throw new Error(why);
}

async function api(path, body, method = "POST", timeout = TIMEOUT_MS) {
  const how = { signal: AbortSignal.timeout(timeout) };
  if (body !== undefined) Object.assign(how, { method, body: JSON.stringify(body) });
  return (await checked(await fetch(`v1/${path}`, how))).json();
}

async function trying(work) {
  by("said").textContent = "";
  try { return await work(); } catch (error) { by("said").textContent = error.message; }
}

const when = (at) => `${at.slice(0, 16).replace("T", " ")} UTC`;
const count = (num, word) => `${num} ${word}${num === 1 ? "" : "s"}`;

// --- asking -----------------------------------------------------------------------------------------

async function* deltas(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the answer was cut off");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((one) => one.startsWith("data: "))) {
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) yield choice.delta.content || "";
    }
  }
}

async function ask(question) {
  const said = { role: "user", content: question }, stopping = new AbortController();
  showTurn("question", question);
  const box = showTurn("answer", "");
  let id = "", text = "";
  begin(stopping);
  box.setAttribute("aria-busy", "true");
  try {
    const body = JSON.stringify({ model: "policy", messages: [...now.messages, said], stream: true });
    const how = { method: "POST", body, signal: stopping.signal };
    const answer = await checked(await fetch("v1/chat/completions", how));
    id = answer.headers.get("X-SRL-Conversation");
    for await (const piece of deltas(answer)) {
      box.textContent = text += piece;
      box.scrollIntoView({ block: "nearest" });
    }
    now.messages.push(said, { role: "assistant", content: text });
  } catch (error) {
    if (!id) by("prompt").value = question; // nothing was answered: it can be sent again
    if (error.name !== "AbortError") throw error;
  } finally {
    box.removeAttribute("aria-busy");
    begin(null);
    if (id) await showMarks(id, box);
  }
}

function begin(stopping) {
  now.answering = stopping;
  by("send").disabled = stopping !== null;
  by("stop").hidden = stopping === null;
}

function showTurn(kind, text) {
  const one = make("div", text, { class: kind });
  by("talk").append(one);
  one.scrollIntoView({ block: "nearest" });
  return one;
}

function clear() {
  now.answering?.abort();
  Object.assign(now, { messages: [], answers: [], undo: [] });
  by("talk").replaceChildren();
  by("said").textContent = "";
  history.replaceState(null, "", location.pathname);
}

function textOf({ content, tool_calls: calls = [] }) {
  return [content, ...calls.map((call) => `${call.function.name} ${call.function.arguments}`)].filter(Boolean).join("\n");
}

async function open(id) {
  const one = await api(`conversations/${encodeURIComponent(id)}`);
  clear();
  for (const turn of one.messages) showTurn(turn.role === "assistant" ? "answer" : "question", textOf(turn));
  now.messages = [...one.messages, { role: "assistant", content: one.answer }];
  await showMarks(id, showTurn("answer", one.answer), one);
  history.replaceState(null, "", `#${id}`);
}

// --- rating -----------------------------------------------------------------------------------------

async function showMarks(id, box, facts) {
  const row = make("div", "", { class: "marks", role: "group", "aria-label": "Rate this answer", id });
  const note = make("p", "", { class: "quiet" });
  const one = { id, row, note, rating: "none", half: [] };
  const values = (now.status ||= await api("status")).rating_values;
  const parts = (pattern) => [...new Set(values.flatMap((value) => value.split(" ")).filter((word) => pattern.test(word)))];
  for (const word of parts(/\D/)) {
    const thumb = button("", () => press(one, word), { value: word, class: "thumb", "aria-label": word, title: word });
    thumb.append(by("thumb").content.cloneNode(true));
    row.append(thumb);
  }
  for (const word of parts(/\d/)) {
    row.append(button("★", () => press(one, word), { value: word, class: "star", "aria-label": count(+word, "star") }));
  }
  row.append(button("Undo", undo, { value: "undo" }));
  if (!box.isConnected) return; // another conversation was begun meanwhile
  box.after(row, note);
  now.answers.push(one);
  mark(one, facts || await stored(id));
}

async function stored(id, tries = 20) { // an answer that was stopped is stored a moment later
  try { return await api(`conversations/${id}`); } catch (error) {
    if (!tries) throw error;
    await new Promise((done) => setTimeout(done, 500));
    return stored(id, tries - 1);
  }
}

function mark(one, facts) {
  Object.assign(one, { rating: facts.rating, half: [] });
  const stars = Number(facts.rating.split(" ").at(-1)) || 0;
  for (const each of one.row.children) {
    if (each.value === "undo") each.disabled = !now.undo.some((change) => change.one === one);
    else each.ariaPressed = String(facts.rating.split(" ").includes(each.value));
    if (each.classList.contains("star")) each.classList.toggle("full", Number(each.value) <= stars);
  }
  const who = facts.rater ? ` by ${facts.rater}` : "";
  const rated = facts.rating === "none" ? "" : `rated ${facts.rating}${who}: reward ${+facts.reward.toFixed(3)}`;
  const untrained = facts.untrainable ? `not trained on: ${facts.untrainable}` : "";
  const ended = { length: "cut off at its most tokens", cut: "cut off" }[facts.finish_reason];
  one.note.textContent = [`version ${facts.version}`, ended, rated, untrained].filter(Boolean).join(" · ");
}

function press(one, word) { // a value of the scheme, or half of one such as "good 4"; the same again takes it back
  return trying(async () => {
    const values = now.status.rating_values, words = one.rating === "none" ? one.half : one.rating.split(" ");
    const both = [/\D/, /\d/].map((pattern) => [word, ...words].find((each) => pattern.test(each)));
    const value = values.includes(word) ? word : both.join(" ");
    if (values.includes(value)) return rate(one, one.rating === value ? "none" : value);
    one.half = [word];
    for (const each of one.row.children) each.ariaPressed = String(each.value === word);
    one.note.textContent = both[0] ? "now the stars, 1 to 5" : "now good or bad";
  });
}

async function rate(one, value, isUndo = false) {
  const before = one.rating;
  const facts = await api(`conversations/${one.id}/rating`, { rating: value, rater: by("rater").value }, "PUT");
  if (!isUndo) now.undo.push({ one, before });
  mark(one, facts);
  await look();
}

function undo() {
  return trying(async () => {
    const change = now.undo.pop();
    if (change) await rate(change.one, change.before, true);
  });
}

// --- conversations and versions ---------------------------------------------------------------------

async function list(before = null) {
  const query = new URLSearchParams({ q: by("q").value, ...(before && { before }) });
  const found = await api(`conversations?${query}`);
  const rows = found.conversations.map((one) => {
    const question = one.messages.at(-1)?.content || "", rating = one.rating === "none" ? "" : `, ${one.rating}`;
    const about = make("small", `version ${one.version}, ${when(one.at)}${rating}`);
    const shown = button(question.slice(0, 100) || "(empty)", () => trying(() => open(one.id)), { value: one.id });
    shown.append(about);
    return make("li", "", {}, shown);
  });
  const focused = document.activeElement?.closest("#conversations button")?.value;
  if (before) by("conversations").append(...rows);
  else by("conversations").replaceChildren(...rows);
  if (focused) by("conversations").querySelector(`[value="${focused}"]`)?.focus();
  if (!by("conversations").children.length) by("conversations").append(make("li", "No conversation."));
  now.before = found.before;
  by("older").hidden = found.before === null;
}

async function listVersions() {
  now.versions = (await api("versions")).versions;
  const opened = new Set([...by("versions").querySelectorAll("[open]")].map((one) => one.id));
  const typed = by("reason")?.value || "", isTyping = document.activeElement === by("reason");
  const rows = now.versions.slice(-50).reverse().map(showVersion);
  by("versions").replaceChildren(...rows, make("p", "Version 0 is the model that was given.", { class: "quiet" }));
  for (const id of opened) if (by(id)) by(id).open = true;
  if (by("reason")) by("reason").value = typed;
  if (isTyping) by("reason")?.focus();
}

function showVersion(one) {
  const withdrawn = one.num_withdrawn_ratings ? `, ${one.num_withdrawn_ratings} withdrawn` : "";
  const head = `${one.number}: ${one.state.replace("_", " ")} · ${count(one.num_ratings, "rating")}${withdrawn}`;
  const facts = [`parent ${one.parent}`, `${one.state.replace("_", " ")} since ${when(one.changed_at)}: ${one.reason || "-"}`];
  for (const gate of one.metrics.verdicts || []) {
    facts.push(`${gate.gate} ${gate.domain}: ${gate.is_passed ? "passed" : "failed"}${gate.reason ? `, ${gate.reason}` : ""}`);
  }
  for (const [name, value] of Object.entries(one.metrics.metrics || {})) facts.push(`${name} ${Number(value).toPrecision(3)}`);
  const shown = make("details", "", { id: `version-${one.number}` });
  shown.append(make("summary", head), make("ul", "", {}, ...facts.map((fact) => make("li", fact))));
  if (one.state === "active") shown.append(rollback(one));
  return shown;
}

function rollback(one) {
  const reason = make("input", "", { id: "reason", maxlength: "300", placeholder: "Why?", "aria-label": "Reason", required: "" });
  const form = make("form", "", { class: "rollback" }, reason, make("button", `Roll back to version ${one.parent}`));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    form.querySelector("button").disabled = true; // a second click does nothing; it may wait for answers under way
    trying(async () => {
      const done = await api("rollback", { version: one.number, reason: reason.value }, "POST", ROLLBACK_MS);
      by("said").textContent = `Version ${done.rolled_back} was rolled back; version ${done.active} answers; `
        + `${count(done.withdrawn_ratings.length, "rating")} withdrawn.`;
    }).finally(look);
  });
  return form;
}

// --- following --------------------------------------------------------------------------------------

async function look() {
  const status = now.status = await api("status"), training = status.training;
  if (status.num_changes !== now.seen) {
    const isAtTop = by("conversations").children.length <= 20;
    await Promise.all([listVersions(), isAtTop ? list() : null]);
    now.seen = status.num_changes;
  }
  document.title = by("title").textContent = `Served model ${status.name}`;
  by("state").textContent = status.is_ready ? `version ${status.active} answers` : "the engine is starting";
  showTraining(training);
  if (by("measured").open) await showFigures();
}

function showTraining(training) {
  const { version, slices, starts_after: after, num_new_ratings: num } = training;
  const next = (now.versions.at(-1)?.number || 0) + 1, ratings = `${num} of ${count(after, "rating")}`;
  const used = now.versions.find((one) => one.number === version)?.num_ratings || 0;
  const step = slices?.of ? `step ${slices.done} of ${slices.of}` : "starting";
  const parts = version ? [`version ${version}: ${count(used, "rating")}, ${step}`] : [];
  if (after) parts.push(`version ${next}: ${ratings}`);
  const words = parts.length ? parts.join(" · ") : "served without training";
  by("training").textContent = words + (training.is_paused ? " (paused)" : "") + (training.error ? `: ${training.error}` : "");
  by("bar").hidden = !parts.length;
  by("bar").value = version ? (slices?.of ? slices.done / slices.of : 0) : Math.min(1, num / (after || 1));
  by("pause").hidden = !parts.length;
  by("pause").textContent = training.is_paused ? "Continue training" : "Pause training";
}

async function showFigures() {
  const shown = (value) => typeof value === "number" ? String(Number.isInteger(value) ? value : +value.toPrecision(3)) : String(value ?? "-");
  const parts = (value) => Object.entries(value).map(([of, num]) => `${of}: ${shown(num)}`).join(", ") || "-";
  const rows = Object.entries(await api("figures")).flatMap(([part, values]) => Object.entries(values).flatMap(([name, value]) => {
    const text = value && typeof value === "object" ? parts(value) : shown(value);
    return [make("dt", `${part}: ${name.replace(/(?<!_per)_s$/, " (s)").replaceAll("_", " ")}`), make("dd", text)];
  }));
  by("figures").replaceChildren(...rows);
}

async function follow(pause = POLL_MS) {
  try {
    if (!document.hidden) await look();
    setTimeout(follow, POLL_MS);
  } catch (error) {
    by("state").textContent = `no connection: ${error.message}`;
    setTimeout(follow, pause, Math.min(2 * pause, LONGEST_PAUSE_MS));
  }
}

// --- hands ------------------------------------------------------------------------------------------

by("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = by("prompt").value.trim();
  if (!question || now.answering) return;
  by("prompt").value = "";
  by("prompt").blur(); // so that keys rate the answer
  trying(() => ask(question));
});
by("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  by("ask").requestSubmit();
});
by("find").addEventListener("submit", (event) => {
  event.preventDefault();
  trying(list);
});
by("stop").addEventListener("click", () => now.answering?.abort());
by("new").addEventListener("click", () => { clear(); by("prompt").focus(); });
by("older").addEventListener("click", () => trying(() => list(now.before)));
by("pause").addEventListener("click", () => trying(async () => {
  await api("training", { paused: !now.status.training.is_paused });
  await look();
}));
by("rater").value = localStorage.getItem(NAME) || "";
by("rater").addEventListener("change", () => localStorage.setItem(NAME, by("rater").value));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return now.answering?.abort();
  if (event.target.matches("input, textarea") || event.ctrlKey || event.altKey || event.metaKey) return;
  const word = { "+": "good", "-": "bad" }[event.key] || event.key, newest = now.answers.at(-1);
  const search = () => { by("past").open = true; by("q").focus(); };
  const isOnButton = event.target.matches("button, summary");
  const act = { u: undo, Enter: !isOnButton && (() => by("prompt").focus()), "/": search }[event.key];
  const found = newest && [...newest.row.children].find((one) => one.value === word && one.value !== "undo");
  if (!act && !found) return;
  event.preventDefault();
  if (act) act();
  else press(newest, word);
});
if (matchMedia("(max-width: 50rem)").matches) for (const id of ["past", "lineage"]) by(id).open = false;
by("measured").addEventListener("toggle", () => trying(look));
addEventListener("hashchange", () => location.hash && trying(() => open(location.hash.slice(1))));
follow().then(() => location.hash && trying(() => open(location.hash.slice(1))));
