"""The chat templates that chat_template names, and which of them stands for a template of
LLaMA-Factory where a tokenizer has none of its own.

Only qwen3 writes tools and thinking itself; the others get them as text (data_chat.py). mistral
and gemma know no system message: it stands before the first question.
"""

import difflib

_SYSTEM_IN_QUESTION = (
    "{% set ns = namespace(system='') %}"
    "{% if messages[0]['role'] == 'system' %}"
    "{% set ns.system = messages[0]['content'] + '\n\n' %}{% endif %}{{ bos_token }}"
)

TEMPLATES = {
    "chatml": "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama3": "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}",
    "mistral": _SYSTEM_IN_QUESTION + "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + ns.system + m['content'] + '[/INST]' }}"
    "{% set ns.system = '' %}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% elif m['role'] != 'system' %}{{ raise_exception('no role ' + m['role']) }}"
    "{% endif %}{% endfor %}",
    "deepseek": "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] + '<｜Assistant｜>' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
    "{% else %}{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}",
    "gemma": _SYSTEM_IN_QUESTION + "{% for m in messages %}"
    "{% if m['role'] == 'user' %}"
    "{{ '<start_of_turn>user\n' + ns.system + m['content'] | trim + '<end_of_turn>\n' }}"
    "{% set ns.system = '' %}"
    "{% elif m['role'] == 'assistant' %}"
    "{{ '<start_of_turn>model\n' + m['content'] | trim + '<end_of_turn>\n' }}"
    "{% elif m['role'] != 'system' %}{{ raise_exception('no role ' + m['role']) }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    "plain": "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ 'Human: ' + m['content'] + '\nAssistant:' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token + '\n' }}"
    "{% else %}{{ m['role'] | capitalize + ': ' + m['content'] + '\n' }}{% endif %}{% endfor %}",
    # as the tokenizers of Qwen3 have it: thinking is written from the last question on, and the
    # last turn has a block even where nothing was thought
    "qwen3": """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and ' }}
    {{- 'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": ' }}
    {{- '<function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(question=messages | length - 1) %}
{%- for message in messages %}
    {%- set text = message.content %}
    {%- set is_result = text.startswith('<tool_response>') and text.endswith('</tool_response>') %}
    {%- if message.role == 'user' and not is_result %}
        {%- set ns.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thinking = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thinking = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.question and (loop.last or thinking) %}
            {{- '<think>\n' + thinking.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}
                {{- '\n' }}
            {%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
""",
}

# templates of LLaMA-Factory -> the built-in one
_LLAMA_FACTORY = {
    "chatml": "chatml chatml_de qwen yi intern2 smollm smollm2",
    "llama3": "llama3",
    "mistral": "mistral ministral",
    "deepseek": "deepseek3 deepseekr1",
    "gemma": "gemma gemma2 gemma3",
    "plain": "default",
    "qwen3": "qwen3 qwen3_nothink",
}
BUILT_IN_FOR = {name: ours for ours, names in _LLAMA_FACTORY.items() for name in names.split()}
# its templates that are not built in: the tokenizers of most of their models bring one
_NOT_BUILT_IN = """
alpaca bailing bailing_v2 breeze chatglm3 cohere cpm4 dbrx deepseek hy3 deepseekcoder dots_ocr
empty ernie ernie_nothink ernie_vl exaone falcon falcon_h1 fewshot gemma3n gemma4 gemma4n glm4
glm4_moe glm4v glm4_5v glm_ocr glm4_7 glmz1 gpt_oss granite3 granite3_vision granite4 index
hunyuan hunyuan_small intern_vl intern_s1 keye_vl kimi_vl lfm2 lfm2_vl llama2 llama2_zh llama4
mllama moonlight llava llava_next llava_next_llama3 llava_next_mistral llava_next_qwen
llava_next_yi llava_next_video llava_next_video_mistral llava_next_video_yi mimo mimo_v2 mimo_vl
minicpm_v minicpm_v_4_6 minicpm_o minimax1 minimax2 mistral_small ministral3 olmo openchat
openchat-3.6 opencoder paligemma paligemma_chat phi phi_small phi4 phi4_mini pixtral qwen2_audio
qwen2_omni qwen3_omni qwen3_omni_nothink qwen2_vl qwen3_vl qwen3_vl_nothink qwen3_5
qwen3_5_nothink qwen3_6 sailor seed_coder seed_oss solar starchat telechat2 vicuna video_llava
xuanyuan yi_vl youtu youtu_vl yuan zephyr aeva
""".split()


def check_template(name: str) -> None:
    """Raise ValueError for a template that LLaMA-Factory does not have either."""
    names = [*BUILT_IN_FOR, *_NOT_BUILT_IN]
    if name not in names:
        near = difflib.get_close_matches(name, names)
        reason = f", did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"LLaMA-Factory has no template of this name{reason}")
