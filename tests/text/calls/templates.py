"""Chat templates as models have them, cut down to what shows how calls, reasoning and results are written."""

_CHATML_TOOLS = (
    "{%- if tools %}<|im_start|>system\n# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    "</tools>\n\nReturn a json object within <tool_call></tool_call> tags.<|im_end|>\n{% endif %}"
)
_CHATML_CALLS = (
    "{%- for call in m.tool_calls %}{% set f = call.function or call %}"
    "{%- if (loop.first and m.content) or not loop.first %}{{ '\\n' }}{% endif %}"
    """{{- '<tool_call>\\n{"name": "' }}{{ f.name }}{{ '", "arguments": ' }}"""
    "{%- if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}"
    "{{- '}\\n</tool_call>' }}{% endfor %}"
)
_CHATML_REST = (
    "{%- elif m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{{- '<|im_end|>\\n' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
)

QWEN25 = (
    _CHATML_TOOLS
    + "{%- for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}{{ '<|im_start|>assistant' }}"
    "{%- if m.content %}{{ '\\n' + m.content }}{% endif %}"
    "{%- for call in m.tool_calls %}{% set f = call.function or call %}"
    """{{- '\\n<tool_call>\\n{"name": "' }}{{ f.name }}{{ '", "arguments": ' }}{{ f.arguments | tojson }}"""
    "{{- '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    + _CHATML_REST
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

QWEN3 = (
    _CHATML_TOOLS
    + "{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{%- for m in messages %}{% if m.role == 'assistant' %}{% set reasoning = m.reasoning_content or '' %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{- m.content.lstrip('\\n') }}"
    + _CHATML_CALLS
    + "{{- '<|im_end|>\\n' }}"
    + _CHATML_REST
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)

# Always begins to think, and its generation prompt says so.
QWEN3_THINKING = QWEN3.replace(
    "{{ '<|im_start|>assistant\\n' }}{%- if en", "{{ '<|im_start|>assistant\\n<think>\\n' }}{%- if en"
)

QWEN3_CODER = (
    "{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for t in tools %}{{ t.function | tojson }}{% endfor %}"
    "{{- '\\n<tool_call>\\n<function=example>\\n<parameter=p>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' }}"
    "{{- '<|im_end|>\\n' }}{% endif %}"
    "{%- for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}{{ '<|im_start|>assistant' }}"
    "{%- if m.content %}{{ '\\n' + m.content | trim + '\\n' }}{% endif %}"
    "{%- for call in m.tool_calls %}{{ '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}"
    "{%- for key, value in call.function.arguments | items %}{{ '<parameter=' + key + '>\\n' }}"
    "{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    "{{- '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    + _CHATML_REST
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_LLAMA = (
    "{{- bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' }}"
    '{%- if tools %}{{ \'Respond in the format {"name": function name, "parameters": dictionary of argument name and '
    "its value}. ' }}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}{{ '<|eot_id|>' }}"
    "{%- for m in messages %}{% if m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}"
    "{{- m.content | tojson }}{{ '<|eot_id|>' }}"
    "{%- elif 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{%- set f = m.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "PYTHON_TAG"
    """{{- '{"name": "' + f.name + '", "parameters": ' }}{{ f.arguments | tojson }}{{ '}<|eot_id|>' }}"""
    "{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
LLAMA31 = _LLAMA.replace(
    "PYTHON_TAG", "{%- if builtin_tools is defined and f.name in builtin_tools %}{{ '<|python_tag|>' }}{% endif %}"
)
LLAMA32 = _LLAMA.replace("PYTHON_TAG", "")

LLAMA32_PYTHONIC = (
    "{{- bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{% if tools %}"
    "{{- 'You SHOULD put it in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...), "
    "func_name2(params)]\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{{ '<|eot_id|>' }}"
    "{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{%- if m.tool_calls %}{{ '[' }}{% for call in m.tool_calls %}{{ call.function.name + '(' }}"
    "{%- for key, value in call.function.arguments | items %}{{ key + '=' }}{{ value | tojson }}"
    "{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ')' }}{% if not loop.last %}{{ ', ' }}{% endif %}"
    "{%- endfor %}{{ ']' }}{% else %}{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

MISTRAL = (
    "{{- bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{%- if tools and loop.last %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{- '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    "{%- if call.id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
    "{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' + eos_token }}"
    "{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{%- else %}{{ '[TOOL_RESULTS] {\"content\": ' + m.content + ', \"call_id\": \"' + m.tool_call_id + '\"}' }}"
    "{{- '[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"
)

MISTRAL_V11 = (
    "{{- bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{%- if tools and loop.last %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{- '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'assistant' %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}"
    "{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{%- endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)

_DEEPSEEK_START = (
    "{{- bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% set ns = namespace(user=false) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.user = true %}{{ '<｜User｜>' + m.content }}"
)
DEEPSEEK_V3 = (
    _DEEPSEEK_START + "{%- elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content }}{% if m.tool_calls %}"
    "{{- '<｜tool▁calls▁begin｜>' }}{% for call in m.tool_calls %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}"
    "{{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}"
    "{{- '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
DEEPSEEK_V31 = (
    "{%- if thinking is not defined %}{% set thinking = false %}{% endif %}"
    + _DEEPSEEK_START
    + "{%- elif m.role == 'assistant' and m['tool_calls'] is defined %}"
    "{%- if ns.user %}{{ '<｜Assistant｜></think>' }}{% endif %}{% set ns.user = false %}{{ m['content'] }}"
    "{{- '<｜tool▁calls▁begin｜>' }}{% for call in m['tool_calls'] %}"
    "{{- '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' + call['function']['arguments'] }}"
    "{{- '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
    "{%- elif m.role == 'assistant' %}{% if ns.user %}{{ '<｜Assistant｜></think>' }}{% endif %}"
    "{%- set ns.user = false %}{{ m['content'] + '<｜end▁of▁sentence｜>' }}"
    "{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
DEEPSEEK_V32 = (
    "{%- set dsml = '｜DSML｜' %}" + _DEEPSEEK_START + "{{- '<｜Assistant｜><think>' }}"
    "{%- elif m.role == 'assistant' %}{{ m.reasoning_content or '' }}{{ '</think>' + m.content }}{% if m.tool_calls %}"
    "{{- '\\n\\n<' + dsml + 'function_calls>' }}{% for call in m.tool_calls %}"
    "{{- '\\n<' + dsml + 'invoke name=\"' + call.function.name + '\">\\n' }}"
    "{%- for key, value in call.function.arguments | items %}"
    "{{- '<' + dsml + 'parameter name=\"' + key + '\" string=\"' + ('true' if value is string else 'false') + '\">' }}"
    "{{- value if value is string else value | tojson }}{{ '</' + dsml + 'parameter>\\n' }}{% endfor %}"
    "{{- '</' + dsml + 'invoke>' }}{% endfor %}{{ '\\n</' + dsml + 'function_calls>' }}{% endif %}"
    "{{- '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
)

GLM45 = (
    "{{- '[gMASK]<sop>' }}{% if tools %}{{ '<|system|>\\n# Tools\\n' + tools | tojson }}{% endif %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\\n' + m.content }}"
    "{%- elif m.role == 'assistant' %}"
    "{{- '<|assistant|>\\n<think>' + (m.reasoning_content or '').strip() + '</think>' }}"
    "{%- if m.content.strip() %}{{ '\\n' + m.content.strip() }}{% endif %}"
    "{%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>' + call.function.name }}"
    "{%- for k, v in call.function.arguments.items() %}{{ '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}"
    "{{- v if v is string else v | tojson }}{{ '</arg_value>' }}{% endfor %}{{ '\\n</tool_call>' }}{% endfor %}"
    "{%- elif m.role == 'tool' %}{{ '<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

KIMI_K2 = (
    "{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}"
    "{%- for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_assistant|>assistant<|im_middle|>' }}"
    "{{- m.content or '' }}{% if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for call in m.tool_calls %}"
    "{{- '<|tool_call_begin|>' + call['id'] + '<|tool_call_argument_begin|>' }}"
    "{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{- '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}{{ '<|im_end|>' }}"
    "{%- else %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)

GPT_OSS = (
    "{{- '<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>' }}"
    "{%- if tools %}{{ '<|start|>developer<|message|># Tools\\n' + tools | tojson + '<|end|>' }}{% endif %}"
    "{%- for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{%- if m.content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}"
    "{{- f.arguments | tojson }}{{ '<|call|>' }}"
    "{%- elif m.role == 'assistant' %}{% if m.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

# Writes calls of a history as bare text, and asks for a mark.
GRANITE3 = (
    "{%- if tools %}{{ '<|start_of_role|>system<|end_of_role|>When a tool is required, respond only with <|tool_call|> "
    "followed by a JSON list of tools used.<|end_of_text|>\\n<|start_of_role|>tools<|end_of_role|>' }}"
    "{{- tools | tojson(indent=4) }}{{ '<|end_of_text|>\\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)
PHI4_MINI = (
    "{{- '<|system|>\\n' }}{% if tools %}{{ 'All function calls should be generated in a single JSON list formatted as "
    'functools[{"name": [function name], "arguments": [function arguments as JSON]}, ...]\\n\' }}'
    "{%- for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}{{ '<|end|>' }}"
    "{%- for m in messages %}{{ '<|' + m.role + '|>\\n' }}{% if m.content %}{{ m.content }}"
    "{%- elif m.tool_calls %}{% for call in m.tool_calls %}"
    """{{- '{"name": "' }}{{ call.function.name }}{{ '", "arguments": ' }}{{ call.function.arguments }}{{ '}' }}"""
    "{%- if not loop.last %},{% endif %}{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}{{ '<|assistant|>\\n' }}"
)

MINIMAX_M2 = (
    "{{- ']~!b[]~b]system\\n' }}{% if tools %}{{ tools | tojson }}{{ '\\n<minimax:tool_call>…</minimax:tool_call>' }}"
    "{%- endif %}{{ '[e~[\\n' }}"
    "{%- for m in messages %}{% if m.role == 'assistant' %}{{ ']~b]ai\\n' }}"
    "{%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{- m.content }}{% if m.tool_calls %}{{ '\\n<minimax:tool_call>\\n' }}{% for call in m.tool_calls %}"
    "{{- '<invoke name=\"' + call.function.name + '\">\\n' }}{% for k, v in call.function.arguments | items %}"
    "{{- '<parameter name=\"' + k + '\">' }}{{ v if v is string else v | tojson }}{{ '</parameter>\\n' }}{% endfor %}"
    "{{- '</invoke>\\n' }}{% endfor %}{{ '</minimax:tool_call>' }}{% endif %}{{ '[e~[\\n' }}"
    "{%- else %}{{ ']~b]' + m.role + '\\n' + m.content + '[e~[\\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}"
)

OLMO3 = (
    "{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
    "{%- for m in messages %}{% if m.tool_calls %}{{ '<|im_start|>assistant\\n<function_calls>\\n' }}"
    "{%- for call in m.tool_calls %}{{ call.function.name + '(' }}"
    "{%- for key, value in call.function.arguments.items() %}{{ key + '=' }}"
    '{%- if value is string %}{{ "\'" + value + "\'" }}{% else %}{{ value | tojson }}{% endif %}'
    "{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ')' }}{% if not loop.last %}{{ '\\n' }}{% endif %}"
    "{%- endfor %}{{ '\\n</function_calls><|im_end|>\\n' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

HUNYUAN = (
    "{%- if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{- '<|extra_0|>' + m.content }}{% if m.tool_calls %}{{ '<tool_calls>[' }}{% for call in m.tool_calls %}"
    """{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}"""
    "{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']</tool_calls>' }}{% endif %}{{ '<|eos|>' }}"
    "{%- else %}{{ '<|startoftext|>' + m.content }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|extra_0|>' }}{% endif %}"
)

PLAIN = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
