import pytest

from areal_jax.tasks import running_sums
from areal_jax.tasks.running_sums import score, write_steps
from areal_jax.tasks.task import TaskError
from areal_jax.text.tokenizer import CharacterTokenizer

PROBLEM = {'question': '7 + 5 + 8', 'answer': '7 + 5 = 12\n12 + 8 = 20'}


class Chats(CharacterTokenizer):
    """Keeps the conversations that it was given."""

    def __init__(self):
        super().__init__('0123456789+= \n')

    def encode_chats(self, conversations, tools=()):
        self.seen = list(conversations)
        return [self.encode(str(conversation[-1]['content'])) for conversation in conversations]


def build(length=3, dataset_size=40, system_prompt='', tokenizer=None):
    return running_sums.build(tokenizer or Chats(), length, dataset_size, system_prompt, held_out_fraction=0.25)


def test_each_step_begins_with_the_sum_so_far():
    assert write_steps((7, 5, 8)) == PROBLEM['answer']
    assert write_steps((9, 9)) == '9 + 9 = 18'


@pytest.mark.parametrize(
    ('text', 'reason', 'reward'),
    [
        (PROBLEM['answer'], 'stop', 1),
        ('First, 7+5=12, then 12+8 = 20.', 'stop', 1),
        (PROBLEM['answer'], 'length', 2 / 3),
        ('7 + 5 = 12', 'stop', 0),  # it ended too early
        ('7 + 5 = 12\n12 + 8 = 19', 'stop', 2 / 3),
        ('7 + 5 = 11\n12 + 8 = 20', 'stop', 1 / 3),  # a step after a wrong one does not count
        ('7 + 5 = 12\n12 + 8 = 20\n20 + 0 = 20', 'stop', 2 / 4),
        ('20', 'stop', 0),
        ('', 'stop', 0),
        ('7 + 5 = 12\n' * 1000, 'length', 1 / 1001),
    ],
)
def test_the_reward_is_the_share_of_right_steps_of_an_answer_that_has_all(text, reason, reward):
    assert score(PROBLEM, text, reason) == pytest.approx(reward)


def test_questions_are_distinct_and_split_by_their_text():
    few, many = build(dataset_size=40), build(dataset_size=80)
    questions = lambda task, side: {problem['question'] for problem in task.problems[side]}
    assert sum(few.sizes().values()) == 40
    assert questions(few, 'train').isdisjoint(questions(few, 'held_out'))
    assert questions(few, 'held_out') <= questions(many, 'held_out')


def test_there_may_be_fewer_lists_than_asked_for():
    assert sum(build(length=2, dataset_size=500).sizes().values()) == 81


def test_the_prompt_shows_an_example_as_a_turn_of_the_chat():
    tokenizer = Chats()
    build(system_prompt='Add.', tokenizer=tokenizer).prompts('train', seed=0).draw()
    system, asked, answered, question = tokenizer.seen[0]
    assert system == {'role': 'system', 'content': 'Add.'}
    assert answered['content'] == write_steps(tuple(map(int, asked['content'].split(' + '))))
    assert question['role'] == 'user'


@pytest.mark.parametrize('length', [1, 17])
def test_too_few_or_too_many_numbers_are_named(length):
    with pytest.raises(TaskError, match=rf'task.length={length}: running_sums adds 2 to 16'):
        build(length=length)
