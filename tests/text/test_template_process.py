"""Chat templates that do not end, or eat what there is, and what may happen to the process that renders them."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mllm_compile.errors import MllmError, RequestError
from mllm_compile.text import template_process
from mllm_compile.text.chat_template import ChatTemplate
from tests.engine.cases import params, start, until
from tests.fakes import ByteTokenizer, fake_engine
from tests.hang_guard import HANG_S

CHAT = [{"role": "user", "content": "hi"}]
SPIN = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# A message is a command, so that one model has good and bad ones. By its length: Jinja computes what is constant.
OBEDIENT = (
    "{% set c = messages[0].content %}{% set n = c | length %}"
    "{% if c == 'spin' %}" + SPIN + "{% elif c == 'power' %}{{ (10 ** (10 ** (n + 4))) % 7 }}"
    "{% elif c == 'double' %}{% set ns = namespace(s='x') %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}"
    "{% endfor %}{% elif c == 'repeat' %}{{ 'a' * 10 ** (n + 4) }}"
    "{% elif c == 'endless' %}{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}"
    "{% elif c == 'recursion' %}{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"
    "{% elif c == 'long error' %}{{ raise_exception('a' * 10 ** (n - 3)) }}"
    "{% else %}{{ c }}!{% endif %}"
)


def chat(content):
    return [{"role": "user", "content": content}]


def processes(template):
    return [process._process.pid for process in tuple(template._processes._processes) if process._process is not None]


def renders(template):
    """True if a process of its has computed for longer than it takes to start."""
    for pid in processes(template):
        with open(f"/proc/{pid}/stat") as stat:
            ticks = stat.read().rsplit(")", 1)[1].split()[11:13]
        if template._processes._idle == [] and sum(map(int, ticks)) > 0.3 * os.sysconf("SC_CLK_TCK"):
            return True
    return False


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def template_without_limit(monkeypatch):
    """One whose renders are ended by a test, at any speed."""
    monkeypatch.setattr(template_process, "MAX_SECONDS", HANG_S)
    return ChatTemplate({"default": OBEDIENT}, {})


@pytest.fixture
def template():
    return ChatTemplate({"default": OBEDIENT}, {})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("double", r"template needs more than 512 MiB of memory for these messages, the most it may\. Shorten"),
        ("repeat", "template needs more than 512 MiB of memory"),
        ("endless", "template makes more than 8388608 characters of these messages, the most it may"),
        ("recursion", "refuses these messages: maximum recursion depth"),
    ],
)
def test_a_template_s_memory_and_its_prompt_have_a_limit(template, content, said):
    with pytest.raises(RequestError, match=said):
        template.render(chat(content))
    assert template.render(CHAT) == "hi!"


def test_a_template_that_does_not_end_is_ended_and_hurts_nobody(monkeypatch):
    monkeypatch.setattr(template_process, "MAX_SECONDS", 0.5)
    template = ChatTemplate({"default": OBEDIENT}, {})

    class ChatTokenizer(ByteTokenizer):
        def apply_chat_template(self, messages, **options):
            return template.render(messages, **options)

    with fake_engine(tokenizer=ChatTokenizer()) as engine:
        spinning = [start(engine.chat, chat(content), params()) for content in ("spin", "power")]
        until(lambda: len(processes(template)) == 2)
        stuck = processes(template)
        for pid in stuck:
            os.kill(pid, signal.SIGSTOP)  # that the good ones do not wait for them is so at any speed
        good = engine.chat([chat("a"), chat("b")], params())
        assert [output.prompt for output in good] == ["a!", "b!"]
        for pid in stuck:
            os.kill(pid, signal.SIGCONT)
        for thread, results in spinning:
            thread.join(HANG_S)
            assert isinstance(results[0], RequestError), results
        said = "the model's chat template takes more than 0.5 s of processor time for these messages, the most it may. "
        assert str(spinning[0][1][0]).startswith(said)
        assert engine.chat(CHAT, params())[0].prompt == "hi!"
    assert len(processes(template)) == 1


@pytest.mark.parametrize("source", ["{{ 'a' * 10 ** 10 }}", "{{ " + "(" * 20_000])
def test_what_is_computed_while_a_template_is_compiled_has_the_same_limits(source):
    """Jinja computes what is constant when it reads a template."""
    with pytest.raises(RequestError, match=r"template (needs more than 512 MiB|is no valid Jinja)"):
        ChatTemplate({"default": source}, {}).render(CHAT)


def test_what_is_said_of_a_refusal_has_an_end_too(template):
    with pytest.raises(RequestError, match=r"a{1000}…$"):
        template.render(chat("long error"))


def test_a_refusal_of_many_lines_is_told_in_one():
    with pytest.raises(RequestError, match=r"refuses these messages: a b$"):
        ChatTemplate({"default": "{{ raise_exception('a\n\n b') }}"}, {}).render(CHAT)


@pytest.mark.parametrize("name", ["a\nb", "", "x" * 10_000])
def test_a_variable_that_is_not_read_is_named_in_brief(name):
    template = ChatTemplate({"default": "".join(f"{{{{ a{i} }}}}" for i in range(1000))}, {})
    with pytest.raises(
        RequestError, match=r"^'.*: the model's chat template reads no such .* read: a0, .*…\.$"
    ) as refused:
        template.render(CHAT, **{name: 1})
    assert len(str(refused.value)) < 1300


def test_a_caller_whose_integers_have_no_limit_is_refused_by_a_process_that_has_one(template):
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        with pytest.raises(RequestError, match=r"must be plain JSON data: Exceeds the limit \(4300 digits\)"):
            template.render(chat(10**5000))
    finally:
        sys.set_int_max_str_digits(limit)
    template.render(CHAT)
    assert len(processes(template)) == 1, "the same served on"


def test_a_chat_that_is_too_large_is_refused_before_it_is_sent(template):
    with pytest.raises(RequestError, match=r"the chat is 3355\d{4} bytes as JSON; expected at most 33554432\. Shorten"):
        template.render(chat("x" * (32 << 20)))
    assert processes(template) == []


def test_a_process_starts_with_the_first_chat_and_is_kept(template):
    assert processes(template) == []
    template.render(CHAT)
    (pid,) = processes(template)
    template.render(CHAT)
    assert processes(template) == [pid] and is_running(pid)


def test_a_template_that_nobody_holds_ends_its_processes():
    template = ChatTemplate({"default": OBEDIENT}, {})
    template.render(CHAT)
    (pid,) = processes(template)
    del template
    gc.collect()
    assert not is_running(pid)


def test_a_process_that_somebody_killed_is_replaced(template_without_limit):
    template_without_limit.render(CHAT)
    (first,) = processes(template_without_limit)
    os.kill(first, signal.SIGKILL)
    until(lambda: not is_running(first))
    assert template_without_limit.render(CHAT) == "hi!"
    thread, results = start(template_without_limit.render, chat("spin"))
    until(lambda: renders(template_without_limit))
    os.kill(processes(template_without_limit)[0], signal.SIGKILL)
    thread.join(HANG_S)
    assert "its process ended (signal 9). Ask again." in str(results[0])
    assert template_without_limit.render(CHAT) == "hi!"
    assert first not in processes(template_without_limit)


def test_ctrl_c_ends_a_render_and_the_next_one_gets_its_own_answer(template_without_limit):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        template_without_limit.render(CHAT)

        def interrupt():
            until(lambda: renders(template_without_limit))
            os.kill(os.getpid(), signal.SIGINT)

        start(interrupt)
        with pytest.raises(KeyboardInterrupt):
            template_without_limit.render(chat("spin"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert processes(template_without_limit) == []
    assert template_without_limit.render(chat("next")) == "next!"


def test_threads_get_their_own_prompts_by_a_few_processes(template):
    def render(number):
        return [template.render(chat(f"{number} {i}")) for i in range(20)]

    with ThreadPoolExecutor(12) as threads:
        for number, prompts in enumerate(threads.map(render, range(12))):
            assert prompts == [f"{number} {i}!" for i in range(20)]
    assert 1 <= len(processes(template)) <= 4
    assert len(template._processes._idle) == len(processes(template))


def test_a_fork_has_processes_of_its_own(template):
    template.render(CHAT)
    (pid,) = processes(template)
    places = [template._processes._places.acquire() for _ in range(4)]  # as by threads that the fork has not
    child = os.fork()
    if child == 0:
        signal.alarm(int(HANG_S))
        try:
            assert template.render(chat("fork")) == "fork!"
            assert pid not in processes(template)
            template._processes._processes.clear()
            del template
            gc.collect()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for _ in places:
        template._processes._places.release()
    assert template.render(CHAT) == "hi!"
    assert processes(template) == [pid]


DIES = """
import sys, threading, time
from mllm_compile.text import template_process
from mllm_compile.text.chat_template import ChatTemplate
template_process.MAX_SECONDS = float(sys.argv.pop(1))
templates = [ChatTemplate({"default": source}, {}) for source in sys.argv[1:]]
chats = [[{"role": "user", "content": text}] for text in ("hi", "spin")]
for template in templates:
    template.render(chats[0])
threading.Thread(target=templates[1].render, args=(chats[1],), daemon=True).start()
pids = [process._process.pid for template in templates for process in template._processes._processes]
ticks = lambda: sum(map(int, open(f"/proc/{pids[1]}/stat").read().rsplit(")", 1)[1].split()[11:13]))
begun = ticks()
while ticks() < begun + 20:
    time.sleep(0.01)
print(*pids, flush=True)
time.sleep(600)
"""


@pytest.fixture
def adopts_orphans():
    """An orphan becomes a child of this process, which so learns how it ended."""
    prctl, set_child_subreaper = ctypes.CDLL(None).prctl, 36
    prctl(set_child_subreaper, 1, 0, 0, 0)
    yield
    prctl(set_child_subreaper, 0, 0, 0, 0)


def test_processes_end_with_the_one_that_started_them(adopts_orphans):
    """Killed, it can tell them nothing; one of them waits for a chat, one is amid a render."""
    command = [sys.executable, "-c", DIES, str(HANG_S), OBEDIENT, OBEDIENT]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_running, pids))
    parent.kill()
    parent.wait()
    waiting, spinning = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert waiting == 0
    assert spinning == -signal.SIGIO, "not by its own limit, which comes later"
    parent.stdout.close()


def test_where_no_process_can_be_started_the_reason_is_told(template, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(MllmError, match=r"no process can be started that renders chat templates: .*/nowhere/python"):
        template.render(CHAT)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RequestError, match=r"its process ended \(exit code 1\)"):
        template.render(CHAT)
    monkeypatch.undo()
    assert template.render(CHAT) == "hi!"


def test_what_asks_has_no_jinja_itself():
    code = (
        "import sys; from mllm_compile.text.chat_template import ChatTemplate;"
        "print(ChatTemplate({'default': 'x'}, {}).render([{'role': 'user', 'content': ''}]), 'jinja2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["x", "False"]


def test_chats_leave_no_descriptor_and_no_thread_behind(template):
    template.render(CHAT)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        with pytest.raises(RequestError):
            template.render(chat("repeat"))
        template.render(CHAT)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_a_file_beside_the_script_with_the_name_of_a_module_of_python_breaks_no_chat(tmp_path, monkeypatch):
    (tmp_path / "re.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)

    assert ChatTemplate({"default": OBEDIENT}, {}).render(CHAT) == "hi!"
