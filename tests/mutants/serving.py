"""Defects in the server: what a request may ask for."""

from __future__ import annotations

from tests.mutants import Mutation

MUTATIONS = (
    Mutation(
        name="a fraction of a short prompt is kept as it is by generate",
        file="kvpolicy/cli/commands/generate.py",
        old="(0 if is_sample else LEAST_TOKENS) if least is None else least",
        new="least or 0",
        tests=("tests/cli/test_generate.py",),
    ),
    Mutation(
        name="a fraction of a short prompt is kept as it is by the server",
        file="kvpolicy/cli/commands/serve.py",
        old="default = LEAST_TOKENS if prefix is None else 0",
        new="default = 0",
        tests=("tests/serving/test_server.py",),
    ),
    Mutation(
        name="an answer may not reach the last position",
        file="kvpolicy/serving/generation.py",
        old="if limit is not None and prompt + new > limit:",
        new="if limit is not None and prompt + new >= limit:",
        tests=("tests/serving/test_limits.py::test_an_answer_may_reach_the_last_position",),
    ),
    Mutation(
        name="a prompt that is the prefix alone is taken",
        file="kvpolicy/serving/prefix.py",
        old="if same is None and len(prompt) > len(self.ids):",
        new="if same is None and len(prompt) >= len(self.ids):",
        tests=("tests/serving/test_requests.py", "tests/serving/test_server.py"),
    ),
    Mutation(
        name="a message with tool calls loses its text",
        file="kvpolicy/serving/templates.py",
        old='given["content"] = _text(given.get("content", None if needs_content else ""))',
        new='given["content"] = _text(given.get("content")) if needs_content else ""',
        tests=("tests/serving/test_messages.py",),
    ),
    Mutation(
        name="transformers converts the messages once more",
        file="kvpolicy/serving/handlers.py",
        old="        return messages\n",
        new="        return BaseChat.get_processor_inputs_from_messages(messages, modality)\n",
        tests=("tests/serving/test_texts.py",),
    ),
    Mutation(
        name="a field of a message that is not supported is left out",
        file="kvpolicy/serving/templates.py",
        old="    _check_names(given)\n",
        new="",
        tests=("tests/serving/test_messages.py",),
    ),
    Mutation(
        name="tools that the template leaves out are taken",
        file="kvpolicy/serving/templates.py",
        old='{"tools": 0} if options.get("tools") else {}',
        new='{"tools": 0} if options.get("functions") else {}',
        tests=("tests/serving/test_templates.py",),
    ),
    Mutation(
        name="tokens are decoded without the prompt",
        file="kvpolicy/reporting/detokenizer.py",
        old="self._context = self._end_of(prompt, special)",
        new="self._context = list[int]()",
        tests=("tests/test_detokenizer.py",),
    ),
    Mutation(
        name="stop strings are looked for without the prompt",
        file="kvpolicy/serving/streamer.py",
        old="Detokenizer(tokenizer, prompt, skip_special_tokens=False)",
        new="Detokenizer(tokenizer, [], skip_special_tokens=False)",
        tests=("tests/serving/test_texts.py",),
    ),
    Mutation(
        name="a stream ends without what waits for the next token",
        file="kvpolicy/serving/streamer.py",
        old="self._put_text(self._text.flush())",
        new="self._text.flush()",
        tests=("tests/serving/test_texts.py",),
    ),
    Mutation(
        name="pieces of characters are sent",
        file="kvpolicy/reporting/detokenizer.py",
        old="if not text or text.endswith(INCOMPLETE):",
        new="if not text:",
        tests=("tests/test_detokenizer.py",),
    ),
    Mutation(
        name="requests with many prompts are answered before others",
        file="kvpolicy/serving/scheduler.py",
        old="elif queue[0].text != answer.text:",
        new="elif False:",
        tests=("tests/serving/test_scheduler.py",),
    ),
    Mutation(
        name="a prompt is read as a whole while rows wait",
        file="kvpolicy/serving/scheduler.py",
        old="if self._share >= 1 or all(row is None for row in self.rows):",
        new="if True:",
        tests=("tests/serving/test_scheduler.py",),
    ),
    Mutation(
        name="the answer of a client that left keeps its row",
        file="kvpolicy/serving/scheduler.py",
        old="if answer is not None and self._is_over(answer):",
        new="if answer is not None and self._stopped is not None:",
        tests=("tests/serving/test_scheduler.py",),
    ),
    Mutation(
        name="an error of a row ends all rows",
        file="kvpolicy/serving/scheduler.py",
        old="            except Exception as error:\n                self._end(row, error)\n",
        new="            except Exception as error:\n                self._end_all(error)\n                return\n",
        tests=("tests/serving/test_scheduler.py",),
    ),
    Mutation(
        name="choices of a prompt share one cache",
        file="kvpolicy/serving/scheduler.py",
        old="cache = self._forwards.copy(cache)",
        new="pass",
        tests=("tests/serving/test_scheduler.py",),
    ),
    Mutation(
        name="all rows draw from the same random numbers",
        file="kvpolicy/serving/sampling.py",
        old="torch.multinomial(scores.softmax(-1), 1, generator=self._generator)",
        new="torch.multinomial(scores.softmax(-1), 1)",
        tests=("tests/serving/test_sampling.py",),
    ),
)
