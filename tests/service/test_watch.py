import asyncio

import pytest

from xllm_npu.service.watch import ClientGone, Watch


class Connection:
    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.waiting = asyncio.Event()

    async def receive(self):
        self.waiting.set()
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def wait_inside(watch: Watch) -> None:
    async with watch:
        await asyncio.Event().wait()


async def test_a_block_that_ends_first_is_undisturbed():
    connection = Connection()
    async with Watch(connection.receive):
        await connection.waiting.wait()
    connection.gone.set()
    await asyncio.sleep(0)
    assert asyncio.current_task().cancelling() == 0


async def test_the_client_leaves():
    connection = Connection()
    connection.gone.set()
    with pytest.raises(ClientGone):
        await wait_inside(Watch(connection.receive))
    assert asyncio.current_task().cancelling() == 0


async def test_the_first_reason_wins():
    connection = Connection()
    watch = Watch(connection.receive)
    asyncio.get_running_loop().call_soon(watch.interrupt, ValueError("mine"))
    asyncio.get_running_loop().call_soon(connection.gone.set)
    with pytest.raises(ValueError, match="mine"):
        await wait_inside(watch)


async def test_a_cancellation_from_outside_stays_one():
    connection = Connection()

    task = asyncio.create_task(wait_inside(Watch(connection.receive)))
    await connection.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_in_the_block_is_not_hidden():
    connection = Connection()
    with pytest.raises(KeyError):
        async with Watch(connection.receive) as watch:
            raise KeyError
    watch.interrupt(ValueError())  # too late: nobody is inside
    await asyncio.sleep(0)
