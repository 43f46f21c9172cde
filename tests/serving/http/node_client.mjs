// Two requests of one question by the OpenAI client for Node: node node_client.mjs FOLDER URL MODEL. FOLDER has node_modules in it.
import { createRequire } from "node:module";

const [folder, url, model] = process.argv.slice(2);
const { OpenAI } = createRequire(`${folder}/`)("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const stream = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: "What is the capital of France?" }],
  max_tokens: 12,
  temperature: 0,
  stream: true,
  stream_options: { include_usage: true },
});
let text = "";
let usage = null;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
const input = "What is the capital of France?";
const response = await client.responses.create({ model, input, max_output_tokens: 12, temperature: 0 });
console.log(JSON.stringify({ text, usage, again: response.output_text }));
