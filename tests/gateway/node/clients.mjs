// Clients from npm: each has a conversation of three turns through the gateway, and prints its history as JSON.
import Anthropic from '@anthropic-ai/sdk';
import OpenAI from 'openai';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { streamText, stepCountIs, tool } from 'ai';
import { z } from 'zod';

const [which, url, big] = process.argv.slice(2);
const result = big === undefined ? '' : 'line of a large result\n'.repeat(Number(big));
const schema = { type: 'object', properties: { q: { type: 'string' } } };

async function anthropic() {
  const client = new Anthropic({ apiKey: 'sk-test', baseURL: url, maxRetries: 0 });
  const messages = [{ role: 'user', content: 'find it' }];
  const tools = [{ name: 'search', description: 'Search.', input_schema: schema }];
  for (const next of [null, 'thanks', undefined]) {
    const stream = client.messages.stream({ model: 'claude-opus-5-5', max_tokens: 4000, messages, tools });
    const answer = await stream.finalMessage();
    messages.push({ role: 'assistant', content: answer.content });
    if (next === undefined) break;
    const calls = answer.content.filter((block) => block.type === 'tool_use');
    const results = calls.map((call) => ({ type: 'tool_result', tool_use_id: call.id, content: result }));
    messages.push({ role: 'user', content: next === null ? results : next });
  }
  return messages;
}

async function chat() {
  const client = new OpenAI({ apiKey: 'sk-test', baseURL: `${url}/v1`, maxRetries: 0 });
  const messages = [{ role: 'user', content: 'find it' }];
  const tools = [{ type: 'function', function: { name: 'search', description: 'Search.', parameters: schema } }];
  for (const next of [null, 'thanks', undefined]) {
    const stream = client.chat.completions.stream({ model: 'gpt-5.6', messages, tools });
    const { role, content, tool_calls } = (await stream.finalChatCompletion()).choices[0].message;
    const calls = (tool_calls ?? []).map(({ id, type, function: f }) => ({ id, type, function: { name: f.name, arguments: f.arguments } }));
    messages.push({ role, content, ...(calls.length ? { tool_calls: calls } : {}) });
    if (next === undefined) break;
    if (next === null) for (const call of calls) messages.push({ role: 'tool', tool_call_id: call.id, content: result });
    else messages.push({ role: 'user', content: next });
  }
  return messages;
}

async function responses() {
  const client = new OpenAI({ apiKey: 'sk-test', baseURL: `${url}/v1`, maxRetries: 0 });
  const tools = [{ type: 'function', name: 'search', description: 'Search.', parameters: schema, strict: false }];
  let input = [{ role: 'user', content: 'find it' }];
  let previous;
  const items = [];
  for (const next of [null, 'thanks', undefined]) {
    const stream = client.responses.stream({ model: 'gpt-5.6', input, tools, previous_response_id: previous });
    const answer = await stream.finalResponse();
    items.push(...answer.output);
    previous = answer.id;
    const calls = answer.output.filter((item) => item.type === 'function_call');
    input = next === null
      ? calls.map((call) => ({ type: 'function_call_output', call_id: call.call_id, output: result }))
      : [{ role: 'user', content: next ?? '' }];
  }
  return items;
}

async function ai(model) {
  const tools = { search: tool({ description: 'Search.', inputSchema: z.object({ q: z.string().optional() }), execute: async () => result }) };
  const messages = [{ role: 'user', content: 'find it' }];
  for (const next of ['thanks', undefined]) {
    const run = streamText({ model, messages, tools, stopWhen: stepCountIs(5), maxRetries: 0, onError: ({ error }) => { throw error; } });
    await run.consumeStream();
    messages.push(...(await run.steps).flatMap((step) => step.response.messages));
    if (next !== undefined) messages.push({ role: 'user', content: next });
  }
  return messages;
}

const clients = {
  anthropic, chat, responses,
  'ai-anthropic': () => ai(createAnthropic({ apiKey: 'sk-test', baseURL: `${url}/v1` })('claude-opus-5-5')),
  'ai-chat': () => ai(createOpenAI({ apiKey: 'sk-test', baseURL: `${url}/v1` }).chat('gpt-5.6')),
  'ai-responses': () => ai(createOpenAI({ apiKey: 'sk-test', baseURL: `${url}/v1` })('gpt-5.6')),
};
console.log(JSON.stringify(await clients[which]()));
