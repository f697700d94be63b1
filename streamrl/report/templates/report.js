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
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") target.open = true;
}

/* A page that was opened from a disk may not use the clipboard API, so an older way is tried too. */
function copy(button, text) {
  const told = (done) => {
    button.textContent = done ? "Copied" : "Select and copy";
    setTimeout(() => (button.textContent = "Copy"), 2000);
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
