"use strict";
document.documentElement.classList.add("js");
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (button) copy(button, button.dataset.copy);
});
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
addEventListener("hashchange", openTarget);
openTarget();

/* A link to a folded section opens it. */
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1).split("?")[0]));
  if (target && target.tagName === "DETAILS") target.open = true;
}

/* A page that was opened from a disk may not use the clipboard API, so an older way is tried too. */
function copy(button, text) {
  const words = button.dataset.words ?? button.textContent;
  button.dataset.words = words;
  const told = (done) => {
    button.textContent = done ? "Copied" : "Select and copy";
    setTimeout(() => (button.textContent = words), 2000);
  };
  const older = () => {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  if (navigator.clipboard) navigator.clipboard.writeText(text).then(() => told(true), () => told(older()));
  else told(older());
}

/* The what-if part. Its rule is that of streamrl/sim/planner/what_if.py, and a test compares both. */
const grid = JSON.parse(document.getElementById("what-if-grid")?.textContent ?? "null");
const unchanged = grid && {
  lengths: grid.unchanged[0], cap: grid.unchanged[1], links: grid.unchanged[2], prices: { ...grid.prices },
  worth: grid.value_of_hour, deadline: grid.deadline, rollout: null, trainer: null, plan: null,
};
let asked = grid && { ...unchanged, prices: { ...grid.prices } };

/* Return the hours and dollars of every plan that fits and has at most the allowed GPUs. */
function pricedPlans(question) {
  return grid.plans.flatMap((plan, place) => {
    const hours = plan.hours[question.lengths][question.cap][question.links];
    const isSmall = plan.rollout_gpus <= (question.rollout || plan.rollout_gpus) && plan.trainer_gpus <= (question.trainer || plan.trainer_gpus);
    if (hours === null || !isSmall) return [];
    const rent = Object.entries(plan.paid).reduce((sum, [pool, count]) => sum + count * question.prices[pool], 0);
    return [{ place, hours, dollars: hours * rent + plan.other_dollars }];
  });
}

function least(plans, value) {
  return plans.reduce((best, plan) => (value(plan) < value(best) ? plan : best));
}

/* Return the plan that the rule chooses, or null if no plan fits. */
function recommend(question) {
  let plans = pricedPlans(question);
  if (!plans.length) return null;
  if (question.deadline !== null) {
    const inTime = plans.filter((plan) => plan.hours <= question.deadline);
    if (!inTime.length) return least(plans, (plan) => plan.hours);
    plans = inTime;
  }
  if (grid.objective === "step-time") return least(plans, (plan) => plan.hours);
  if (grid.objective === "pareto") return least(plans, (plan) => plan.hours * plan.dollars);
  if (question.worth > 0) return least(plans, (plan) => plan.dollars + question.worth * plan.hours);
  const most = (1 + grid.tolerance) * Math.min(...plans.map((plan) => plan.dollars));
  return least(plans.filter((plan) => plan.dollars <= most), (plan) => plan.hours);
}

const money = (value) => "$" + (value >= 100 ? Math.round(value).toLocaleString("en-US") : value.toFixed(2));
const digits = (value) => Number(value.toPrecision(3)).toLocaleString("en-US");
const time = (hours) => (hours >= 48 ? digits(hours / 24) + " days" : hours >= 1 ? digits(hours) + " hours" : digits(hours * 60) + " minutes");

/* A deadline is in hours throughout, so two positions of its slider compare at a glance. */
const inHours = (hours) => (hours >= 1 ? digits(hours) + " hours" : digits(hours * 60) + " minutes");

function make(tag, properties = {}, ...children) {
  const one = Object.assign(document.createElement(tag), properties);
  one.append(...children);
  return one;
}

/* One slider over a list of values: its label, the values, how to show one, and how to read and set it. */
function slider(label, values, show, get, set) {
  const output = make("output");
  const input = make("input", { type: "range", min: 0, max: values.length - 1, step: 1 });
  input.setAttribute("aria-label", label);
  const row = make("label", { className: "slider" }, make("span", { textContent: label }), output, input);
  row.refresh = () => {
    const value = get(asked);
    const place = values.reduce((best, each, at) => (far(each, value) < far(values[best], value) ? at : best), 0);
    input.value = place;
    output.textContent = show(value);
    input.setAttribute("aria-valuetext", show(value));
    row.classList.toggle("moved", get(unchanged) !== value);
  };
  input.addEventListener("input", () => {
    set(asked, values[input.value]);
    asked.plan = null;
    update();
  });
  return row;
}

/* The distance of two values of a slider; null stands for "any" and is near nothing else. */
function far(one, other) {
  return one === other ? 0 : one === null || other === null ? Infinity : Math.abs(one - other);
}

const sorted = (values) => [...new Set(values)].sort((a, b) => a - b);
const any = (value, text) => (value === null ? "any" : text(value));

function pricesAround(price) {
  const steps = Array.from({ length: 61 }, (_, at) => at / 20);
  return price ? sorted(steps.map((step) => Number((price * step).toFixed(3))).concat(price)) : Array.from({ length: 41 }, (_, at) => at / 4);
}

function deadlines() {
  const hours = grid.plans.flatMap((plan) => plan.hours.flat(2)).filter((each) => each !== null);
  const [low, high] = [Math.min(...hours), Math.max(...hours)];
  const steps = Array.from({ length: 24 }, (_, at) => Number((low * (high / low) ** (at / 23)).toPrecision(2)));
  return [...sorted(steps.concat(grid.deadline ?? [])), null];
}

function controls() {
  const group = (title, ...rows) => make("fieldset", {}, make("legend", { textContent: title }), ...rows.filter(Boolean));
  const axis = (values) => values.map((_, at) => at);
  const tokens = (count) => Math.round(count).toLocaleString("en-US") + " tokens";
  const most = (key) => sorted(grid.plans.map((plan) => plan[key]));
  const gpus = (key, name, label) =>
    most(key).length > 1 && slider(label, [...most(key).slice(0, -1), null], (value) => any(value, String), (q) => q[name], (q, value) => (q[name] = value));
  return [
    group("The work",
      grid.lengths.length > 1 && slider("Mean length", axis(grid.lengths), (at) => tokens(meanTokens(at, asked.cap)), (q) => q.lengths, (q, at) => (q.lengths = at)),
      slider("Cap on length", axis(grid.caps), (at) => tokens(grid.caps[at]), (q) => q.cap, (q, at) => (q.cap = at))),
    group("The offer",
      ...Object.entries(grid.prices).map(([pool, price]) =>
        slider(`${grid.gpus[pool]}${grid.gpus[pool].toLowerCase() === pool.toLowerCase() ? "" : " in " + pool}, $ an hour`, pricesAround(price), (value) => "$" + value.toFixed(2), (q) => q.prices[pool], (q, value) => (q.prices[pool] = value))),
      grid.links.length > 1 && slider("Link between pools", axis(grid.links), (at) => digits((grid.bandwidth * grid.links[at] * 8) / 1e9) + " Gbit/s", (q) => q.links, (q, at) => (q.links = at)),
      gpus("rollout_gpus", "rollout", "GPUs that generate, at most"),
      gpus("trainer_gpus", "trainer", "GPUs that train, at most")),
    group("The decision",
      slider("An hour of waiting costs you", sorted([0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, grid.value_of_hour]), (value) => "$" + value.toLocaleString("en-US", { minimumFractionDigits: Number.isInteger(value) ? 0 : 2 }), (q) => q.worth, (q, value) => (q.worth = value)),
      slider("Deadline", deadlines(), (value) => (value === null ? "none" : inHours(value)), (q) => q.deadline, (q, value) => (q.deadline = value))),
  ];
}

/* The state is in the fragment of the address, so a copied address shows the same. */
const NAMES = { lengths: "len", cap: "cap", links: "link", worth: "hour", deadline: "deadline", rollout: "gen", trainer: "train", plan: "plan" };

function fragment() {
  const found = new URLSearchParams();
  for (const [key, name] of Object.entries(NAMES)) if (asked[key] !== unchanged[key]) found.set(name, asked[key] ?? "none");
  for (const [pool, price] of Object.entries(asked.prices)) if (price !== unchanged.prices[pool]) found.set("price." + pool, price);
  const text = found.toString();
  return text ? "#what-if?" + text : "";
}

function restore() {
  const found = new URLSearchParams(location.hash.split("?")[1] ?? "");
  asked = { ...unchanged, prices: { ...unchanged.prices } };
  const sizes = { lengths: grid.lengths.length, cap: grid.caps.length, links: grid.links.length, plan: grid.plans.length };
  for (const [key, name] of Object.entries(NAMES)) {
    if (!found.has(name)) continue;
    const value = found.get(name) === "none" ? null : Number(found.get(name));
    const isPlace = key in sizes;
    if (value === null ? !isPlace || key === "plan" : value >= 0 && (!isPlace || (Number.isInteger(value) && value < sizes[key]))) asked[key] = value;
  }
  for (const pool of Object.keys(asked.prices)) {
    const price = Number(found.get("price." + pool) ?? NaN);
    if (price >= 0) asked.prices[pool] = price;
  }
}

function update() {
  document.querySelectorAll(".slider").forEach((row) => row.refresh());
  const plans = pricedPlans(asked);
  const found = recommend(asked);
  const best = plans.find((plan) => plan.place === found?.place);
  const shown = plans.find((plan) => plan.place === asked.plan) ?? best;
  showResult(plans, best, shown);
  drawChart(plans, best, shown);
  rank(plans, best, shown);
  history.replaceState(null, "", fragment() || location.href.split("#")[0]);
}

/* Other lengths, caps and links make the hours of a plan estimates, if they change them. */
const hoursOf = (place, question) => grid.plans[place].hours[question.lengths][question.cap][question.links];
const isScaled = (place) => hoursOf(place, asked) !== hoursOf(place, unchanged);
const isMoved = () => fragment() !== "" && fragment() !== "#what-if?plan=" + asked.plan;

/* A plan has one name on the page. The label of an option holds without a change, so a moved slider names its GPUs. */
function nameOf(place) {
  const plan = grid.plans[place];
  return plan.number === null ? plan.name : `${plan.number} \u00b7 ${isMoved() ? plan.gpus : plan.name}`;
}

function basisOf(place) {
  const plan = grid.plans[place];
  if (!plan.is_simulated) return "estimate, not simulated";
  if (isScaled(place)) return "estimate, scaled from a simulation";
  return plan.has_total ? "simulated" : "estimate from a short simulation";
}

/* The command that gives a plan under the values of the sliders. An option that nothing was changed for is taken from its directory. */
function commandOf(place) {
  const plan = grid.plans[place], words = [...grid.command.words];
  if (isTaken(place)) return joined(["streamrl", "plan", ...words, "-o", grid.command.directory, "--take", plan.number]);
  const settings = keysChanged();
  withoutSettings(words, [...Object.keys(settings), ...(isOther("deadline") ? ["plan.deadline"] : [])]);
  if (words.includes("--gpus")) answersChanged(words, settings);
  const sets = Object.entries({ ...settings, ...plan.changes }).flatMap(([key, value]) => ["--set", `${key}=${value}`]);
  return joined(["streamrl", "plan", ...words, ...sets, "-o", grid.command.changed_directory]);
}

const isTaken = (place) => grid.plans[place].number !== null && !isMoved();
const isOther = (...keys) => keys.some((key) => asked[key] !== unchanged[key]);
const meanTokens = (lengths, cap) => grid.command.mean_tokens[lengths][cap];
const bandwidth = (links) => `${Number(((grid.bandwidth * grid.links[links] * 8) / 1e9).toPrecision(6))} Gbps`;

/* Remove settings from the words of a command, because others replace them. */
function withoutSettings(words, keys) {
  const isOld = (at) => words[at] === "--set" && keys.includes(String(words[at + 1]).split("=")[0]);
  for (let at = words.length - 2; at >= 0; at--) if (isOld(at)) words.splice(at, 2);
}

/* Change the answers of a plan that was made without a run file; an answer takes the place of its setting. */
function answersChanged(words, settings) {
  const answer = (name, value) => {
    const at = words.indexOf(name);
    if (at < 0) words.push(...(value === null ? [] : [name, value]));
    else words.splice(at, 2, ...(value === null ? [] : [name, value]));
  };
  if (isOther("deadline")) answer("--deadline", asked.deadline === null ? null : `${asked.deadline} hours`);
  if (isOther("lengths", "cap")) answer("--mean-tokens", meanTokens(asked.lengths, asked.cap));
  if (isOther("cap")) answer("--max-tokens", grid.caps[asked.cap]);
  if (isOther("links")) answer("--link", bandwidth(asked.links));
  answer("--gpus", grid.command.offer.map(offered).join(","));
  for (const key of Object.keys(settings)) if (key !== "plan.value_of_hour") delete settings[key];
}

function offered(part) {
  const price = asked.prices[part.pool];
  return price === unchanged.prices[part.pool] ? part.text : `${part.unpriced}@${price}`;
}

/* Return the keys that sliders change, with their values. */
function keysChanged() {
  const found = {};
  if (isOther("worth")) found["plan.value_of_hour"] = asked.worth;
  if (isOther("deadline") && asked.deadline !== null) found["plan.deadline"] = `${asked.deadline} h`;
  if (isOther("lengths")) for (const [key, value] of Object.entries(grid.command.scale)) found[key] = Number((value * grid.lengths[asked.lengths]).toPrecision(6));
  if (isOther("cap")) found["rollout.max_tokens"] = grid.caps[asked.cap];
  for (const [pool, price] of Object.entries(asked.prices)) if (price !== unchanged.prices[pool]) found[grid.command.price_keys[pool]] = price;
  return found;
}

/* Return what the command cannot say. */
function unsaid(place) {
  if (isTaken(place)) return [];
  const found = grid.plans[place].unsaid ? [grid.plans[place].unsaid] : [];
  if (grid.command.offer.length) return found;
  if (isOther("deadline") && asked.deadline === null) found.push("To plan without a deadline, remove plan.deadline from the run file.");
  if (isOther("links")) found.push(`The command has the links of the run file. Multiply their bandwidth by ${grid.links[asked.links]} there.`);
  return found;
}

/* Join words as a shell reads them. */
const joined = (words) => words.map((word) => (/^[\w@%+=:,.\/-]+$/.test(word) ? word : `'${String(word).replaceAll("'", `'"'"'`)}'`)).join(" ");

const updates = (plan) => `${plan.staleness} update${plan.staleness === 1 ? "" : "s"}`;

const line = (className, text) => make("p", { className, textContent: text });

function showResult(plans, best, shown) {
  const box = document.querySelector(".result");
  if (!best) return box.replaceChildren(line("plan", "No plan of this page fits these values."), ...missing());
  const own = plans.find((plan) => plan.place === 0);
  const state = shown !== best ? "A plan that you picked" : isLate(best) ? "No plan keeps the deadline; the fastest is" : !isMoved() ? "As planned" : best.place === 0 ? "Option 1 stays the best" : "For these values the rule chooses";
  const plan = grid.plans[shown.place];
  const lines = [
    line("state", state),
    line("plan", nameOf(shown.place)),
    line("choice", plan.choice),
    line("figures", `${money(shown.dollars)} \u00b7 ${time(shown.hours)}`),
    ...limitsOf(shown).map((text) => line("state", text)),
    line("state", `${basisOf(shown.place)}; ${plan.system}; rollouts lag ${updates(plan)} behind`),
  ];
  if (shown.place !== 0) lines.push(line("state", own ? `Option 1 would cost ${money(own.dollars)} and take ${time(own.hours)}.` : `Option 1 does not fit: ${whyNot(0)}.`));
  lines.push(...missing());
  const command = commandOf(shown.place);
  for (const text of unsaid(shown.place)) lines.push(line("state", text));
  const copyCommand = make("button", { type: "button", textContent: "Copy command", title: command });
  copyCommand.dataset.copy = command;
  const copyLink = make("button", { type: "button", textContent: "Copy link" });
  copyLink.dataset.copy = location.href.split("#")[0] + fragment();
  const reset = make("button", { type: "button", textContent: "Reset" });
  reset.addEventListener("click", () => ((asked = { ...unchanged, prices: { ...unchanged.prices } }), update()));
  box.replaceChildren(...lines, make("p", { className: "actions" }, copyCommand, copyLink, reset));
}

/* Return why a plan is not among those that are priced. */
const whyNot = (place) => (hoursOf(place, asked) === null ? "with outputs this long it needs more GPU memory than its GPUs have" : "it has more GPUs than these values allow");

/* Say how many plans have gone for want of memory. */
function missing() {
  const count = grid.plans.filter((_, place) => hoursOf(place, asked) === null).length;
  return count ? [line("state", `${count} of ${grid.plans.length} plans need more GPU memory for outputs this long, and are not shown.`)] : [];
}

/* Return the limits that a plan exceeds, and what waiting for it costs. */
function limitsOf(plan) {
  const found = [];
  if (asked.worth > 0) found.push(waiting(plan));
  if (isLate(plan)) found.push(`Misses the deadline of ${inHours(asked.deadline)}.`);
  if (isDear(plan)) found.push(`Exceeds the budget of ${money(grid.budget)}.`);
  return found;
}

const isLate = (plan) => asked.deadline !== null && plan.hours > asked.deadline;
const isDear = (plan) => grid.budget !== null && plan.dollars > grid.budget;
const waiting = (plan) => `${money(plan.dollars)} + ${money(asked.worth * plan.hours)} waiting = ${money(plan.dollars + asked.worth * plan.hours)}`;

function pick(place) {
  asked.plan = place;
  update();
  copy(document.querySelector(".result [data-copy]"), commandOf(place));
}

/* Return the plans that no other beats in both, the fastest first. */
function front(plans) {
  const byTime = [...plans].sort((a, b) => a.hours - b.hours || a.dollars - b.dollars);
  return byTime.filter((plan, at) => byTime.slice(0, at).every((other) => other.dollars > plan.dollars));
}

function ticks(low, high, most) {
  const size = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = [1, 2, 5, 10, 20].map((n) => n * size).find((each) => (high - low) / each <= most - 1);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, at) => (first + at) * step);
}

function drawChart(plans, best, shown) {
  const box = document.querySelector(".chart");
  const width = Math.max(box.clientWidth, 280), height = width < 480 ? 260 : 320;
  const edge = { left: 58, right: 18, top: 26, bottom: 46 };
  const svg = (tag, attributes, text) => {
    const one = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
    if (text !== undefined) one.textContent = text;
    return one;
  };
  const range = (values) => {
    const low = Math.min(...values), high = Math.max(...values), margin = 0.08 * (high - low) || 0.1 * high || 1;
    return [Math.max(0, low - margin), high + margin];
  };
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Cost against time of each plan" });
  box.replaceChildren(picture);
  if (!plans.length) return;
  const withLimit = (values, limit) => (limit !== null && limit <= 2 * Math.max(...values) ? [...values, limit] : values);
  const hours = withLimit(plans.map((plan) => plan.hours), asked.deadline), paid = withLimit(plans.map((plan) => plan.dollars), grid.budget);
  const [fast, slow] = range(hours), [cheap, dear] = range(paid);
  const inMinutes = slow < 2;
  const x = (hours) => edge.left + ((hours - fast) / (slow - fast)) * (width - edge.left - edge.right);
  const y = (dollars) => height - edge.bottom - ((dollars - cheap) / (dear - cheap)) * (height - edge.top - edge.bottom);
  const unit = inMinutes ? 1 / 60 : 1;
  for (const value of ticks(fast / unit, slow / unit, width < 480 ? 4 : 6)) {
    const at = x(value * unit);
    picture.append(svg("polyline", { class: "grid", points: `${at},${edge.top} ${at},${height - edge.bottom}` }));
    picture.append(svg("text", { class: "t muted small", "text-anchor": "middle", x: at, y: height - edge.bottom + 18 }, digits(value)));
  }
  for (const value of ticks(cheap, dear, 5)) {
    picture.append(svg("polyline", { class: "grid", points: `${edge.left},${y(value)} ${width - edge.right},${y(value)}` }));
    picture.append(svg("text", { class: "t muted small", "text-anchor": "end", x: edge.left - 8, y: y(value) + 4 }, "$" + digits(value)));
  }
  picture.append(svg("text", { class: "t small", x: 0, y: 12 }, "dollars of the whole run"));
  picture.append(svg("text", { class: "t small", "text-anchor": "end", x: width - edge.right, y: height - 8 }, (inMinutes ? "minutes" : "hours") + " of the whole run"));
  if (hours.length > plans.length) {
    const at = x(asked.deadline), isRight = at > width / 2;
    picture.append(svg("polyline", { class: "limit", points: `${at},${edge.top} ${at},${height - edge.bottom}` }));
    picture.append(svg("text", { class: "t small", "text-anchor": isRight ? "end" : "start", x: at + (isRight ? -6 : 6), y: edge.top + 10 }, "deadline " + inHours(asked.deadline)));
  }
  if (paid.length > plans.length) {
    picture.append(svg("polyline", { class: "limit", points: `${edge.left},${y(grid.budget)} ${width - edge.right},${y(grid.budget)}` }));
    picture.append(svg("text", { class: "t small", x: edge.left + 6, y: y(grid.budget) - 6 }, "budget " + money(grid.budget)));
  }
  const corners = front(plans);
  const stairs = corners.flatMap((plan, at) => (at ? [[x(plan.hours), y(corners[at - 1].dollars)]] : []).concat([[x(plan.hours), y(plan.dollars)]]));
  picture.append(svg("polyline", { class: "front", points: stairs.map((each) => each.join(",")).join(" ") }));
  const order = [...plans].sort((a, b) => (a === best) - (b === best));
  for (const plan of order) {
    const kind = plan === best ? "dot chosen" : isLate(plan) || isDear(plan) ? "dot beyond" : corners.includes(plan) ? "dot on-front" : "dot";
    const spot = svg("circle", { class: kind + " spot", cx: x(plan.hours), cy: y(plan.dollars), r: plan === best ? 7 : 5.5, tabindex: 0, role: "button", "aria-label": told(plan) });
    spot.append(svg("title", {}, told(plan)));
    spot.addEventListener("click", () => pick(plan.place));
    spot.addEventListener("keydown", (event) => event.key === "Enter" && pick(plan.place));
    picture.append(spot);
  }
  if (shown) picture.append(svg("circle", { class: "ring", cx: x(shown.hours), cy: y(shown.dollars), r: 11 }));
}

const told = (plan) => `${nameOf(plan.place)}, ${grid.plans[plan.place].choice}: ${money(plan.dollars)}, ${time(plan.hours)}, ${basisOf(plan.place)}`;

const MOST_ROWS = 8;

/* List the options, the best and the shown plan, and other plans on the front while there is room. */
function rank(plans, best, shown) {
  const table = document.querySelector(".ranked");
  const kept = plans.filter((plan) => plan === best || plan === shown || grid.plans[plan.place].number !== null);
  const others = front(plans).filter((plan) => !kept.includes(plan));
  const room = Math.max(0, MOST_ROWS - kept.length);
  const every = Math.max(1, others.length / (room || 1));
  kept.push(...others.filter((_, at) => room && Math.floor(at / every) !== Math.floor((at - 1) / every)));
  kept.sort((a, b) => a.dollars - b.dollars);
  const heads = ["option", "total cost", "takes", "these figures are", "rollouts lag behind", ""];
  const isNumber = (at) => at === 1 || at === 2;
  const cell = (text, at) => make("td", { textContent: text, className: isNumber(at) ? "number" : "" });
  const rows = kept.map((plan) => {
    const one = grid.plans[plan.place];
    const row = make("tr", { className: plan === shown ? "chosen" : "" });
    const chosen = plan !== best ? [] : [!isMoved() ? "recommended" : isLate(plan) ? "fastest" : "best for these values"];
    const note = [...chosen, ...(isLate(plan) ? ["misses the deadline"] : []), ...(isDear(plan) ? ["exceeds the budget"] : [])].join(", ");
    [nameOf(plan.place), money(plan.dollars), time(plan.hours), basisOf(plan.place), updates(one), note].forEach((text, at) => {
      const made = cell(text, at);
      made.dataset.head = heads[at];
      if (at === 0) made.append(make("small", { textContent: one.choice }));
      if (at === 1 && asked.worth > 0) made.append(make("small", { textContent: waiting(plan) }));
      row.append(made);
    });
    row.addEventListener("click", () => pick(plan.place));
    return row;
  });
  const head = make("tr", {}, ...heads.map((text, at) => make("th", { scope: "col", textContent: text, className: isNumber(at) ? "number" : "" })));
  table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
}

if (grid) {
  restore();
  document.querySelector(".controls").append(...controls());
  document.querySelector(".controls").addEventListener("submit", (event) => event.preventDefault());
  update();
  addEventListener("resize", update);
  addEventListener("hashchange", () => (restore(), update()));
  if (location.hash.startsWith("#what-if")) document.getElementById("what-if").scrollIntoView();
  window.whatIf = { recommend, pricedPlans, grid };
}
