"""What a trainer such as verl puts into vLLM's workers.  Here it sends the engine to sleep."""


class TrainerExtension:
    """`worker_extension_cls` of `scripted_engine`."""

    def sleep_and_lose_the_drafter(self, _):
        """As a sleep of level 2 on a GPU; on a CPU vLLM itself keeps all memory.  What drafter and policy share
        is the trainer's to send."""
        policy, drafter = self.model_runner.get_model(), self.model_runner.drafter.model
        shared = {tensor.data_ptr() for tensor in [*policy.parameters(), *policy.buffers()]}
        self.sleep(level=2)
        for tensor in [*drafter.parameters(), *drafter.buffers()]:
            if tensor.data_ptr() not in shared:
                tensor.data.zero_()
        self.wake_up()
