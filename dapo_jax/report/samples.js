"use strict";
// Shows the page's sampled responses by run, step and verdict; tokens by their probability.
(() => {
  const holder = document.getElementById("samples-data");
  if (!holder) return;
  const all = JSON.parse(holder.textContent);
  const [run, step, list, count] = ["run", "step", "list", "count"].map((name) =>
    document.getElementById(`sample-${name}`));
  const verdicts = document.querySelectorAll("#sample-verdicts input");
  // The least probability of each class of page.css: p0 is likely, p4 the least likely.
  const CLASSES = [0.9, 0.5, 0.2, 0.05, 0];
  const SHORT = 200; // characters of a prompt that need no folding

  function node(name, attributes, parent, text) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    if (text !== undefined && text !== null) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  const distinct = (values) => [...new Set(values)];

  function options(select, values, text) {
    const before = select.value;
    select.replaceChildren();
    for (const value of values) node("option", { value }, select, text(value));
    if (values.map(String).includes(before)) select.value = before;
  }

  function tokens(sample, parent) {
    sample.texts.forEach((text, i) => {
      if (sample.cut && i === sample.cut[0]) leftOut(sample.cut[1], "tokens", parent);
      const p = sample.logp[i] === null ? null : Math.exp(sample.logp[i]);
      const kind = p === null ? 4 : CLASSES.findIndex((least) => p >= least);
      // Many tokens have no text of their own: bytes of a character, and the one that ends it all.
      const last = i === sample.texts.length - 1 && sample.verdict !== "truncated";
      const shown = text || (last ? "end" : "\u00b7");
      const name = text ? JSON.stringify(text) : last ? "the end" : "a part of a character";
      const title = `${name}, probability ${p === null ? "-" : +p.toPrecision(3)}`;
      node("span", { class: `p${kind}${text ? "" : last ? " mark end" : " mark"}`, title }, parent, shown);
    });
  }

  function leftOut(number, what, parent) {
    node("em", {}, parent, ` ... ${number} ${what} left out ... `);
  }

  function card(sample) {
    const made = node("article", { class: sample.verdict }, list);
    const head = node("header", {}, made);
    node("b", {}, head, sample.verdict);
    const facts = [
      `ground truth ${sample.ground_truth}`,
      `prediction ${sample.prediction ?? "none"}`,
      sample.status,
      sample.reward === null ? null : `reward ${+sample.reward.toPrecision(3)}`,
      `${sample.tokens} tokens`,
      sample.trained === false ? "not trained on" : null,
    ];
    for (const fact of facts) if (fact) node("span", {}, head, fact);
    const line = sample.prompt.replace(/\s+/g, " ");
    if (line.length > SHORT) {
      const prompt = node("details", {}, made);
      node("summary", {}, prompt, `${line.slice(0, SHORT)}...`);
      node("pre", {}, prompt, sample.prompt);
    } else node("p", {}, made, line);
    const response = node("pre", { class: "response" }, made);
    if (sample.texts) tokens(sample, response);
    else {
      const [at, left] = sample.cut || [sample.text.length, 0];
      response.append(sample.text.slice(0, at));
      if (left) leftOut(left, "characters", response);
      response.append(sample.text.slice(at));
    }
  }

  function show() {
    const wanted = [...verdicts].filter((box) => box.checked).map((box) => box.value);
    const here = all.filter((s) => s.run === run.value && s.step === +step.value);
    const found = here.filter((s) => wanted.includes(s.verdict));
    list.replaceChildren();
    found.forEach(card);
    const by = ["right", "wrong", "truncated"].map(
      (name) => `${here.filter((s) => s.verdict === name).length} ${name}`);
    count.textContent = `${found.length} of ${here.length} shown (${by.join(", ")})`;
  }

  function chooseRun() {
    const steps = distinct(all.filter((s) => s.run === run.value).map((s) => s.step));
    options(step, steps, (value) => `step ${value}`);
    show();
  }

  // A tap shows what a pointer reads in the title.
  list.addEventListener("click", (event) => {
    const text = event.target.closest(".response span")?.title;
    if (text) document.getElementById("sample-token").textContent = text;
  });
  options(run, distinct(all.map((s) => s.run)), (value) => value);
  run.addEventListener("change", chooseRun);
  step.addEventListener("change", show);
  for (const box of verdicts) box.addEventListener("change", show);
  chooseRun();
})();
