"""Chat templates of a model, which are programs, on a fixed conversation."""

from foreword.models.chat import ChatTemplate
from fuzz.mutations import mutate_text
from fuzz.target import Target

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi " * 100},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
VALID = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{{ messages[-1].tool_calls }}",
    "{%- set ns = namespace(found=false) -%}{%- for m in messages[1:] -%}"
    "{%- if loop.first %}{% set ns.found = true %}{% endif %}{{ loop.index0 ~ m['role'] | trim | upper }}"
    "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ c.arguments | default({}) | tojson(indent=2) }}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}{% endif %}{% endfor %}",
    "{% macro line(m, n=2) %}{{ m.role.title() }}: {{ (m.content or '').split(' ')[:n] | join('-') }}\n{% endmacro %}"
    "{% for m in messages if m.role != 'system' %}{{ line(m, 3) }}{% else %}none{% endfor %}{{ bos_token }}"
    "{% set text %}a{{ strftime_now('%Y-%m-%d') }}{% endset %}{{ text | replace('a', 'b') | length }}"
    "{{ '%s=%d' % ('x', 5) }}{{ '{:>5}'.format(7) }}{{ range(3) | map('string') | list }}{{ messages[-1].tool_calls }}",
    "{% generation %}{{ tools[0].function | tojson }}{% endgeneration %}{{ messages | map(attribute='role') | list }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'x' * 3 }}{{ 2 ** 5 }}{{ 7 // 2 }}"
    "{{ messages[-1].tool_calls }}",
)
WORDS = (
    "{{ ", " }}", "{% ", " %}", "{% break %}", "{% continue %}", "{% endfor %}", "{% endif %}", "{% endmacro %}",
    "{% for i in range(10**5) %}", "{% for i in range(99999) %}{% for j in range(99999) %}", "{% generation %}",
    "{% recursive %}", "{{ loop(messages) }}", " recursive ", "range(10**9)", "lipsum(n=10**7)", " * 10**9",
    " ** 10**9",
    " | center(10**9)", " | indent(10**9)", " | join('x' * 10**6)", " | list", " | batch(2) | list", " | slice(10**9)",
    " | replace('', 'x' * 10**6)", " | format(10**9)", "'%1000000000d' % 5", "'{:1000000000}'.format(5)", " ~ messages",
    "strftime_now('%Y' * 10**6)", "raise_exception('x')", "messages", "[messages]*99999", "__class__", ".append(1)",
    "| map('list')", " | sum(start=[])", "| tojson(indent=10**9)", "'a'.ljust(10**9)", "cycler(*range(10**6))",
    "dict(a=1)", "namespace()", "joiner()", "{% set x = x ~ x %}", "{% include 'x' %}", "{% extends 'x' %}",
    "{% import 'x' as y %}", "{% filter upper %}", "{% raw %}", "{% call line(1) %}", "{% with a = 1 %}", "not ",
    " is ",
    "(" * 300, "[" * 300, "-" * 3000, " if 1 else" * 300, "~'a'" * 3000, "\0", "\n", "{#", "9" * 5000, "1e400", "é🙂",
)  # fmt: skip
HOSTILE = (
    "{% break %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}" + "{% endfor %}" * 3,
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{{ strftime_now('%Y' * 10 ** 8) }}", "{{ strftime_now('%Y' * 10 ** 5 ~ '%c' * 10 ** 5) }}",
    "{{ messages | slice(10 ** 9) | list }}", "{{ messages | slice(10 ** 9) }}",
    "{{ messages | batch(10 ** 9, 'x') | list }}",
    "{{ lipsum(n=10 ** 7) }}", "{{ 'x' * 10 ** 9 }}", "{{ [1] * 10 ** 9 }}", "{{ 'x' * 10 ** 5 * 10 ** 5 }}",
    "{{ 10 ** 10 ** 10 }}", "{{ 9 ** 9 ** 9 ** 9 }}", "{{ 2 ** 31 ** 2 ** 3 % 7 }}", "{{ (10 ** 4000) | string }}",
    "{{ '%1000000000d' % 5 }}", "{{ '%*d' % (10 ** 9, 5) }}", "{{ '%.1000000000f' % 5 }}",
    "{{ '%1000000000d' | format(5) }}",
    "{{ '{:1000000000}'.format(5) }}", "{{ '{:{}}'.format(5, 10 ** 9) }}", "{{ 'a'.center(10 ** 9) }}",
    "{{ 'a'.ljust(10 ** 9) }}", "{{ 'a'.rjust(10 ** 9) }}", "{{ 'a'.zfill(10 ** 9) }}",
    "{{ '\t'.expandtabs(10 ** 9) }}",
    "{{ ('\t' * 10 ** 4).expandtabs(10 ** 6) }}", "{{ 'a' | center(10 ** 9) }}", "{{ 'a\na' | indent(10 ** 9) }}",
    "{{ 'a a' | wordwrap(1, wrapstring='x' * 10 ** 6) }}", "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ 'x' * 10 ** 5 | replace('x', 'y' * 10 ** 5) }}", "{{ ('x' * 10 ** 5).replace('x', 'y' * 10 ** 5) }}",
    "{{ ('x' * 10 ** 5) | replace('', 'y' * 10 ** 5) }}", "{{ range(99999) | join('x' * 10 ** 5) }}",
    "{{ ('x' * 10 ** 5).join(['a'] * 99999) }}", "{{ ('x' * 10 ** 5).join('a' * 10 ** 5) }}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set ns = namespace(x='x') %}{% for i in range(99999) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='x') %}{% for i in range(99999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=3) %}{% for i in range(99999) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x % 2 }}",
    "{% set ns = namespace(x='x') %}{% for i in range(99999) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "{% set ns = namespace(x='x') %}{% for i in range(99999) %}{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x | tojson }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x == ns.x }}",
    "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}{{ ns.x | tojson }}",
    "{% set x %}{% for i in range(99999) %}{{ 'x' * 10 ** 5 }}{% endfor %}{% endset %}",
    "{% macro f() %}{% for i in range(99999) %}{{ 'x' * 10 ** 5 }}{% endfor %}{% endmacro %}{{ f() | length }}",
    "{% for i in range(99999) %}{{ 'x' * 10 ** 5 }}{% endfor %}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{{ range(99999) | map('list') | list }}", "{{ [range(99999)] * 99999 | map('list') | list }}",
    "{% for x in [range(99999)] * 99999 %}{{ x | sum }}{% endfor %}",
    "{{ ([range(99999)] * 99999) | sum(start=0) }}", "{{ ([range(99999)] * 99999) | map('sum') | sum }}",
    "{{ ([range(99999)] * 99999) | map('list') | map('length') | sum }}",
    "{{ range(9999) | groupby('real') | list }}", "{{ range(99999) | map('center', 99999) | list | length }}",
    "{{ (range(99999) | list * 999) | sort | length }}", "{{ ('a' * 10 ** 6) | urlize }}",
    "{{ ('a@' * 10 ** 5) | urlize }}",
    "{{ ('<' * 10 ** 5) | striptags }}", "{{ ('<!--' * 10 ** 5) | striptags }}", "{{ ('a ' * 10 ** 6) | wordwrap(1) }}",
    "{{ ('&' * 10 ** 6)" + " | e" * 12 + " }}", "{{ messages | pprint }}",
    "{{ ('a' * 10 ** 6) | xmlattr }}", "{{ {'a' * 10 ** 6: 1} | xmlattr }}", "{{ 'x' | filesizeformat }}",
    "{{ cycler(*range(10 ** 5)) }}", "{{ dict(range(99999) | batch(2)) }}", "{{ range(10 ** 5) | random }}",
    "{{ ('a' * 10 ** 5).split('') }}", "{{ ('a ' * 10 ** 6).split() | length }}",
    "{{ ('a' * 10 ** 6).encode('utf-16') }}",
    "{{ ('a' * 10 ** 5).translate({97: 'b' * 10 ** 5}) }}", "{{ (1 << 10 ** 9) }}", "{{ 'a'.maketrans('a', 'b') }}",
    "{{ (10 ** 3).to_bytes(10 ** 9, 'big') }}", "{{ 'x'.count('') }}", "{{ 5 | round(10 ** 9) }}", "{{ 1e308 | int }}",
    "{{ '9' * 10 ** 6 | int }}", "{{ ('9' * 10 ** 6) | int }}", "{{ ('9' * 4000) | int ** 99999 }}",
    "{{ ('f' * 10 ** 6) | int(base=16) | string }}", "{{ (messages * 10 ** 5) | tojson }}", "{{ '\\ud800' }}",
    "{{ messages | map(attribute='content.' * 10 ** 5) | list }}", "{{ loop }}", "{{ self }}", "{{ self.x() }}",
    "{% block x %}{{ self.x() }}{{ self.x() }}{% endblock %}", "{{ caller() }}", "{{ undefined() }}", "{{ 1() }}",
    "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}{% call m() %}x{% endcall %}{% endcall %}",
    "{{ " + "(" * 10**4 + "1" + ")" * 10**4 + " }}", "{{ " + "-" * 10**5 + "1 }}",
    "{% if 1 %}" * 10**4, "{{ 1 " + "+ 1" * 10**5 + " }}",
    "{{ 1 " + "if 1 else 2" * 10**4 + " }}", "{{ " + "[" * 99 + "1" + "]" * 99 + " }}",
    "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
    "x" * 10**7, "{{ 1 }}" * 10**5, "{% set x = 1 %}" * 10**5, "{# " * 10**5, "{% raw %}" * 10**5,
    "{{ messages." + "a." * 10**4 + "b }}", "{{ x" + " | upper" * 10**4 + " }}", "{% break %}{% continue %}",
    "{% macro f(a, a) %}{% endmacro %}",
    "{% macro f() %}{% break %}{% endmacro %}{% for i in [1] %}{{ f() }}{% endfor %}",
    "{% for i in [1] %}{% set x %}{% break %}{% endset %}{% endfor %}", "{% set a.b = 1 %}",
    "{% set messages[0] = 1 %}",
)  # fmt: skip


def valid():
    return [source.encode() for source in VALID]


def hostile():
    return [source.encode() for source in HOSTILE]


def mutate(rng, data):
    return mutate_text(rng, data.decode(), WORDS).encode(errors="replace")


def read(data, folder):
    ChatTemplate(data.decode(errors="replace"), {"bos_token": "<s>"}).render(MESSAGES, tools=TOOLS)


TARGET = Target(valid, read, mutate, hostile)
