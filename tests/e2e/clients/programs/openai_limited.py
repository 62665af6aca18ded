"""OpenAI's client over its limit: it reads when to come again, does so by itself, and succeeds."""

import sys

import openai

client = openai.OpenAI(
    base_url=f"{sys.argv[1]}/v1", api_key="none", timeout=60, max_retries=20, default_headers={"x-client": "fast"}
)
for _ in range(4):
    answer = client.chat.completions.create(
        model="counted", messages=[{"role": "user", "content": "a b"}], max_tokens=20
    )
    assert answer.choices[0].message.content, answer

hasty = client.with_options(max_retries=0)
try:
    for _ in range(2):
        answer = hasty.chat.completions.with_raw_response.create(
            model="counted", messages=[{"role": "user", "content": "a"}], max_tokens=20
        )
        assert answer.headers["x-ratelimit-limit-requests"] == "1"
except openai.RateLimitError as error:
    assert error.type == "rate_limit_error" and error.code == "rate_limit_exceeded", error
    assert int(error.response.headers["retry-after-ms"]) > 0
else:
    raise AssertionError("two requests at once were within the limit")
print("openai ok")
