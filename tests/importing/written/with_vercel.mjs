// Write spans of the Vercel AI SDK as OTLP. A mock model takes its answers from a list.
//
//   npm install ai@5.0.277 @opentelemetry/sdk-trace-base@2 @opentelemetry/otlp-transformer && node with_vercel.mjs

import { writeFileSync } from "node:fs";
import { generateText, jsonSchema, stepCountIs, tool } from "ai";
import { MockLanguageModelV2, mockValues } from "ai/test";
import { JsonTraceSerializer } from "@opentelemetry/otlp-transformer";
import { BasicTracerProvider, InMemorySpanExporter, SimpleSpanProcessor } from "@opentelemetry/sdk-trace-base";

const exporter = new InMemorySpanExporter();
const provider = new BasicTracerProvider({ spanProcessors: [new SimpleSpanProcessor(exporter)] });
const usage = { inputTokens: 9, outputTokens: 1, totalTokens: 10 };
const parts = [
  [{ type: "tool-call", toolCallId: "c1", toolName: "legs", input: '{"animal": "cat"}' }],
  [{ type: "reasoning", text: "3 times 4." }, { type: "text", text: "12" }],
];
const answers = parts.map((content, n) => ({ content, usage, warnings: [], finishReason: n ? "stop" : "tool-calls" }));
const model = new MockLanguageModelV2({ modelId: "m", doGenerate: async () => next() });
const next = mockValues(...answers);
const inputSchema = jsonSchema({ type: "object", properties: { animal: { type: "string" } } });

await generateText({
  model,
  system: "Calculate.",
  prompt: "How many legs have 3 cats?",
  temperature: 0.7,
  tools: { legs: tool({ inputSchema, execute: async () => "FOUR" }) },
  stopWhen: stepCountIs(2),
  experimental_telemetry: { isEnabled: true, tracer: provider.getTracer("ai") },
});
const document = new TextDecoder().decode(JsonTraceSerializer.serializeRequest(exporter.getFinishedSpans()));
writeFileSync(new URL("vercel-ai-5.0.277.json", import.meta.url), document + "\n");
