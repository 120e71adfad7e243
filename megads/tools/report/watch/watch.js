// Asks for the page's body again and again, and shows it in place: what is unfolded and where one has scrolled stays.
"use strict";
const everyMs = 1000 * Number(document.currentScript.dataset.everyS);
const lost = document.createElement("p");
lost.className = "status bad";
lost.hidden = true;
let shown = null;

function tellAges() {
  for (const moment of document.querySelectorAll("time[data-ended-s]")) {
    const seconds = Math.max(0, Math.round(Date.now() / 1000 - Number(moment.dataset.endedS)));
    const units = seconds < 120 ? [seconds, "s"] : seconds < 7200 ? [Math.round(seconds / 60), "min"] :
      seconds < 172800 ? [Math.round(seconds / 3600), "h"] : [Math.round(seconds / 86400), "days"];
    moment.textContent = units.join(" ") + " ago";
  }
}

async function renew() {
  try {
    const answer = await fetch(location.pathname + "?body", {
      headers: shown === null ? {} : { "If-None-Match": shown },
    });
    if (answer.status === 200) {
      const main = document.querySelector("main");
      const open = [...main.querySelectorAll("details")].map((part) => part.open);
      main.innerHTML = await answer.text();
      main.querySelectorAll("details").forEach((part, place) => { part.open = open[place] ?? false; });
      shown = answer.headers.get("ETag");
      document.body.dataset.renewed = Number(document.body.dataset.renewed ?? 0) + 1;
      lost.hidden = true;
    } else if (answer.status === 304) {
      lost.hidden = true;
    } else {
      say("the server answers " + answer.status + ": open the address that megads watch has printed");
    }
  } catch {
    say("no answer: does megads watch still run, and the tunnel to it?");
  }
  setTimeout(renew, everyMs);
}

function say(words) {
  lost.textContent = words;
  lost.hidden = false;
}

document.body.prepend(lost);
tellAges();
setInterval(tellAges, 1000);
setTimeout(renew, everyMs);
