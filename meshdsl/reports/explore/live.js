// The process of `meshdsl explore --live`: it computes plans that were not computed ahead.
const REST = 350; // milliseconds without a change before it is asked, so that no half-written rule is computed

// `arrived` gets the key of a choice and the answer; `failed` is called when there is none.
const liveProcess = (arrived, failed) => {
  const questions = new Map(); // by key: why there is no answer, or "" while one may come
  let wanted = null, last = null, timer = 0;
  const ask = async (key, choice) => {
    questions.set(key, "");
    last = key;
    let problem = "gone";
    try {
      const answer = await fetch("plan", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(choice) });
      const read = await answer.json();
      if (answer.ok) { questions.delete(key); arrived(key, read); return; }
      problem = answer.status === 409 ? "replaced" : read.error;
    } catch (error) {
      if (error instanceof SyntaxError) problem = "it failed, as its terminal says"; // no JSON
      else if (!(error instanceof TypeError)) throw error; // fetch: nobody answers
    }
    if (key === wanted && problem === "replaced" && last !== key) return ask(key, choice); // by this page itself
    if (key === wanted) { questions.set(key, problem); failed(); } else questions.delete(key);
  };
  return {
    // Asks for a choice once nothing else has been wanted for a moment; without a key, for nothing.
    want: (key, choice) => {
      if (key === wanted) return;
      clearTimeout(timer);
      if (questions.get(wanted)) questions.delete(wanted); // it is asked again when it is chosen again
      wanted = key;
      if (key !== null && !questions.has(key)) timer = setTimeout(() => ask(key, choice), REST);
    },
    ask,
    problem: (key) => questions.get(key) || "",
  };
};

const paretoFront = (plans) => {
  const place = (number) => plans[number].figures;
  let least = Infinity;
  return [...plans.keys()].filter(place).sort((a, b) => place(a).seconds - place(b).seconds || place(a).peak_bytes - place(b).peak_bytes || a - b)
    .filter((number) => { const smaller = place(number).peak_bytes < least; least = Math.min(least, place(number).peak_bytes); return smaller; });
};
