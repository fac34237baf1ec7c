"use strict";
(() => {
  const body = document.body;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let figures = JSON.parse(document.getElementById("figures").textContent);

  async function loadLibrary() {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (one) => one.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  const narrow = () => innerWidth < 760;

  // On a narrow page the legend needs more rows.
  const heightOf = (figure) => figure.height + (narrow() ? 20 * Math.max(0, figure.data.length - 3) : 0);

  function layoutOf(figure) {
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const axis = (given) => ({
      gridcolor: colour("--grid"), zerolinecolor: colour("--line"), linecolor: colour("--line"), automargin: true,
      ...given, title: { standoff: 8, ...(given || {}).title },
    });
    return {
      ...figure.layout,
      xaxis: axis(figure.layout.xaxis),
      yaxis: axis(figure.layout.yaxis),
      height: heightOf(figure),
      autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      colorway: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#9aa0a6"],
      font: { color: colour("--text"), size: narrow() ? 11 : 12, family: getComputedStyle(body).fontFamily },
      margin: { l: 10, r: 14, t: 26, b: 10 },
      hoverlabel: { align: "left", namelength: -1 },
      legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom", ...figure.layout.legend },
      dragmode: narrow() ? false : "zoom",
    };
  }

  async function draw() {
    const settings = { responsive: true, displaylogo: false, displayModeBar: false };
    let drawn = 0;
    for (const figure of figures) {
      const element = document.getElementById("chart-" + figure.key);
      if (!element) continue;
      element.style.height = heightOf(figure) + "px";
      await Plotly.react(element, figure.data, layoutOf(figure), settings);
      drawn += 1;
    }
    body.dataset.drawn = String(drawn);
  }

  function showError(error) {
    const element = document.getElementById("problem");
    element.textContent = "The charts could not be drawn: " + error + ". A browser of 2023 or later is needed.";
    element.hidden = false;
    body.dataset.problem = String(error);
  }

  function replaceMain(html) {
    const old = document.getElementById("main");
    const fresh = document.createElement("main");
    fresh.id = "main";
    fresh.innerHTML = html;
    for (const element of fresh.querySelectorAll(".chart")) {
      const existing = document.getElementById(element.id);
      if (existing) { existing.style.height = element.style.height; element.replaceWith(existing); }
    }
    for (const fold of fresh.querySelectorAll("details")) {
      const existing = old.querySelector('details[data-key="' + CSS.escape(fold.dataset.key) + '"]');
      if (existing) fold.open = existing.open;
    }
    old.replaceWith(fresh);
  }

  async function watch(url) {
    const status = document.getElementById("live");
    let known = "";
    for (;;) {
      try {
        const answer = await fetch(url + "?known=" + known, { cache: "no-store" });
        if (answer.status === 200) {
          const news = await answer.json();
          const top = scrollY;
          known = news.version;
          figures = news.figures;
          document.title = news.title;
          replaceMain(news.main);
          await draw();
          scrollTo(0, top);
          body.dataset.version = known;
        }
        status.className = "";
        status.textContent = "live";
      } catch (error) {
        status.className = "away";
        status.textContent = "gnnfleet report --watch has ended";
      }
      await new Promise((go) => setTimeout(go, 2000));
    }
  }

  (async () => {
    try {
      await loadLibrary();
      await draw();
      dark.addEventListener("change", draw);
      if (body.dataset.live) watch(body.dataset.live);
    } catch (error) {
      showError(error);
    }
  })();
})();
