"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const count = data.names.length;
  const bytes = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

  function digits(value) {
    return Math.abs(value) < 9.995 ? value.toFixed(2) : Math.abs(value) < 99.95 ? value.toFixed(1) : value.toFixed(0);
  }

  function shown(value, unit) {
    if (value === null) return "–";
    if (unit === "bytes") {
      let place = 0;
      while (Math.abs(value) >= 999.5 && place + 1 < bytes.length) { value /= 1024; place += 1; }
      return (place ? digits(value) : value) + " " + bytes[place];
    }
    if (unit === "seconds") {
      return value >= 60 ? `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s` : digits(value) + " s";
    }
    if (unit === "share") return Number((100 * value).toPrecision(3)) + " %";
    return String(Number(value.toPrecision(4)));
  }

  function element(name, text, parent) {
    const made = document.createElement(name);
    made.textContent = text;
    parent.append(made);
    return made;
  }

  function hide(plot) {
    tip.hidden = true;
    plot.querySelector(".cursor").style.display = "none";
  }

  function show(plot, chart, place) {
    const box = plot.getBoundingClientRect();
    const at = box.width * (place + 0.5) / count;
    const cursor = plot.querySelector(".cursor");
    cursor.style.display = "block";
    cursor.style.left = at + "px";
    tip.replaceChildren();
    element("b", data.names[place], element("p", "", tip));
    element("p", data.saved[place], tip).className = "when";
    if (data.notes[place]) element("p", data.notes[place], tip);
    const table = element("table", "", tip);
    for (const series of chart.series) {
      const row = element("tr", "", table);
      const name = element("td", "", row);
      const swatch = element("i", "", name);
      swatch.className = "swatch t-" + series.tone;
      name.append(series.name);
      element("td", shown(series.values[place], chart.unit), row);
    }
    tip.hidden = false;
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    const left = box.left + at + (at > box.width / 2 ? -wide - 14 : 14);
    tip.style.left = Math.max(8, Math.min(left, innerWidth - wide - 8)) + "px";
    tip.style.top = Math.max(8, Math.min(box.top + 8, innerHeight - high - 8)) + "px";
  }

  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const plot = figure.querySelector(".plot"), chart = data.charts[figure.dataset.chart];
    let place = count - 1;
    const follow = event => {
      const box = plot.getBoundingClientRect();
      place = Math.max(0, Math.min(count - 1, Math.floor((event.clientX - box.left) / box.width * count)));
      show(plot, chart, place);
    };
    plot.addEventListener("pointermove", follow);
    plot.addEventListener("pointerdown", follow);
    plot.addEventListener("pointerleave", () => hide(plot));
    plot.addEventListener("blur", () => hide(plot));
    plot.addEventListener("keydown", event => {
      const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -count, End: count };
      if (event.key === "Escape") hide(plot);
      if (!(event.key in moves)) return;
      event.preventDefault();
      place = Math.max(0, Math.min(count - 1, place + moves[event.key]));
      show(plot, chart, place);
    });
  }
  document.documentElement.dataset.ready = String(count);
})();
