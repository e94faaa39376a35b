// Write results of promptfoo. A provider takes its answers from a function.
//
//   npm install promptfoo@0.121.20 && node with_promptfoo.mjs

import promptfoo from "promptfoo";

const model = async (prompt, context) =>
  context.vars.n === 0
    ? { error: "timeout" }
    : { output: prompt.startsWith("[") ? "12" : "17 legs", finishReason: "stop", tokenUsage: { total: 3 } };
const messages = [
  { role: "system", content: "Calculate." },
  { role: "user", content: "How many legs have {{n}} cats?" },
];

await promptfoo.evaluate(
  {
    prompts: [{ raw: JSON.stringify(messages), label: "chat" }, "How many legs have {{n}} cats?"],
    providers: [{ id: () => "m", callApi: model }],
    tests: [
      { vars: { n: 3 }, assert: [{ type: "equals", value: "12", metric: "exact" }, { type: "contains", value: "1" }] },
      { vars: { n: 2 } },
      { vars: { n: 0 }, assert: [{ type: "equals", value: "0" }] },
    ],
    outputPath: ["promptfoo-0.121.20.json"],
    writeLatestResults: false,
  },
  { cache: false, maxConcurrency: 1 },
);
process.exit(0);
