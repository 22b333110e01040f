"use strict";
// Draws the page's figures. Run figures share their runs' columns; the reader chooses the x axis, zoom goes along.
(async () => {
  if (!window.DecompressionStream) {
    for (const plot of document.querySelectorAll(".plot")) plot.textContent = "Plots need a browser of 2023 or newer.";
    return;
  }
  await unpack();
  const { runs, figures } = JSON.parse(document.getElementById("page-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const div = (number) => document.getElementById(`plot${number}`);
  const isPanel = (figure) => "lines" in figure;
  const config = { responsive: true, displaylogo: false, showTips: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d", "sendChartToCloud"] };
  const windows = [1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000]; // drawn updates that the slider takes the mean of
  let axis = "steps";
  let smoothing = 1;

  // What hovering shows beside the value; one list per run, shared by all of its lines.
  const places = runs.map(({ axes }) =>
    axes.steps.map((step, i) => [step, axes.samples[i], axes.tokens[i], axes.time[i]]));

  // At each place the mean of the last `smoothing` values, of fewer at the start; null is left out.
  function smoothed(values) {
    let sum = 0, count = 0;
    return values.map((value, i) => {
      const gone = i >= smoothing ? values[i - smoothing] : null;
      if (value !== null) { sum += value; count += 1; }
      if (gone !== null) { sum -= gone; count -= 1; }
      return value === null ? null : sum / count;
    });
  }

  // The slider draws its mean over each line, which stays below it, exact and faint; where a panel has a faint line of
  // its own, its mean takes the place of the line above it.
  function traces(line, figure, unitOfTime) {
    if (smoothing === 1 || !figure.smooths || line.style !== "line") return [trace(line, unitOfTime)];
    const faint = figure.lines.find(({ run, style }) => run === line.run && style === "faint");
    const source = faint ?? line;
    const over = trace({ ...source, style: "line" }, unitOfTime);
    over.y = over.text = smoothed(over.y);
    over.name = `${source.column}, mean of ${smoothing}`;
    return faint ? [over] : [{ ...trace({ ...line, style: "faint" }, unitOfTime), showlegend: false }, over];
  }

  function trace(line, unitOfTime) {
    const run = runs[line.run];
    const all = run.columns[line.column];
    const kept = all.map((_, i) => i).filter((i) => line.style !== "points" || all[i] !== null);
    const pick = (list) => (line.style === "points" ? kept.map((i) => list[i]) : list);
    const values = pick(all);
    return {
      type: "scatter", name: line.column, x: pick(run.axes[axis]), y: values, text: values, customdata: pick(places[line.run]),
      meta: { run: run.name, column: line.column },
      hovertemplate: `<b>${escaped(run.name)}</b><br>${line.column} %{text}<br>step %{customdata[0]:,} · ` +
        `%{customdata[1]:,} samples · %{customdata[2]:,} tokens · %{customdata[3]:.4~g} ${unitOfTime}<extra></extra>`,
      mode: line.style === "points" ? "markers" : all.length === 1 ? "markers" : "lines",
      line: { color: run.colour, width: line.style === "faint" ? 1 : 1.8, shape: line.style === "stairs" ? "vh" : "linear" },
      marker: { color: run.colour, size: 8, symbol: "diamond", line: { width: 1, color: dark.matches ? "#fff" : "#222" } },
      opacity: line.style === "faint" ? 0.35 : 1,
    };
  }

  // Runs the plotting library, which the page holds as base64 of gzip.
  async function unpack() {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (one) => one.charCodeAt(0));
    const library = document.createElement("script");
    library.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(library);
  }

  function escaped(text) {
    return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  function themed(layout) {
    const styles = getComputedStyle(document.documentElement);
    const get = (name) => styles.getPropertyValue(name).trim();
    const lines = { gridcolor: get("--line"), zerolinecolor: get("--line"), linecolor: get("--line"), automargin: true };
    return {
      margin: { l: 60, r: 15, t: 12, b: 45 }, hovermode: "closest", hoverdistance: 60,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: get("--text"), family: "system-ui, sans-serif", size: 12 },
      hoverlabel: { bgcolor: get("--card"), bordercolor: get("--line"), font: { color: get("--text") }, align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: get("--dim"), activecolor: get("--accent") },
      xaxis: { ...lines, ...layout.xaxis, title: { standoff: 8, ...layout.xaxis.title } },
      yaxis: { ...lines, ...layout.yaxis, title: { standoff: 12, ...layout.yaxis.title } },
    };
  }

  function draw(number) {
    const figure = figures[number];
    if (!isPanel(figure)) return Plotly.react(div(number), figure.data, themed(figure.layout), config);
    const drawn = figure.lines.flatMap((line) => traces(line, figure, figure.units.time.includes("hours") ? "h" : "s"));
    return Plotly.react(div(number), drawn, themed({
      uirevision: axis,
      showlegend: runs.length === 1 && drawn.length > 1, // the names of several runs stand beside the axis buttons
      xaxis: { title: { text: figure.units[axis] }, uirevision: axis },
      yaxis: { title: { text: figure.unit }, tickformat: figure.isLog ? "" : figure.tickFormat, type: figure.isLog ? "log" : "linear", uirevision: figure.isLog },
    }), config);
  }

  // Zooming one run figure along x zooms the others.
  function zoomTogether(number, event) {
    const range = "xaxis.range[0]" in event ? [event["xaxis.range[0]"], event["xaxis.range[1]"]] : null;
    if (!range && !event["xaxis.autorange"]) return;
    figures.forEach((figure, other) => {
      if (other === number || !isPanel(figure)) return;
      const now = div(other).layout.xaxis;
      const differs = range ? now.range[0] !== range[0] || now.range[1] !== range[1] : !now.autorange;
      if (differs) Plotly.relayout(div(other), range ? { "xaxis.range": [...range] } : { "xaxis.autorange": true });
    });
  }

  function press(buttons, pressed) {
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button === pressed)));
  }

  // Tables that are wider than the page say so.
  const mark = () => document.querySelectorAll(".scroll").forEach((box) => {
    box.toggleAttribute("data-scrolls", box.scrollWidth > box.clientWidth + 1);
  });
  mark();
  addEventListener("resize", mark);
  document.querySelectorAll("details").forEach((fold) => fold.addEventListener("toggle", mark));

  const axisButtons = [...document.querySelectorAll("[data-axis]")];
  axisButtons.forEach((button) => button.addEventListener("click", () => {
    axis = button.dataset.axis;
    press(axisButtons, button);
    figures.forEach((figure, number) => isPanel(figure) && draw(number));
  }));
  const slider = document.getElementById("smoothing");
  if (slider) slider.addEventListener("input", () => {
    smoothing = windows[Number(slider.value)];
    slider.nextElementSibling.value = smoothing === 1 ? "off" : `mean of ${smoothing}`;
    figures.forEach((figure, number) => isPanel(figure) && figure.smooths && draw(number));
  });
  document.querySelectorAll("[data-log]").forEach((button) => button.addEventListener("click", () => {
    const figure = figures[button.dataset.log];
    figure.isLog = !figure.isLog;
    button.setAttribute("aria-pressed", String(figure.isLog));
    draw(button.dataset.log);
  }));
  dark.addEventListener("change", () => figures.forEach((_, number) => draw(number)));
  Promise.all(figures.map((figure, number) => draw(number).then(() => {
    if (isPanel(figure)) div(number).on("plotly_relayout", (event) => zoomTogether(number, event));
  }))).then(() => document.body.setAttribute("data-drawn", "true"));
})();
