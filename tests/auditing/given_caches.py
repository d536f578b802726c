"""Caches of one's own, as their users write them on transformers' classes: sound ones, and each fault by itself."""

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

# Sound ----------------------------------------------------------------------------------------------------------------


class Copying(DynamicCache):
    """Gives attention copies of what it keeps."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys.clone(), values.clone()


class Slab(CacheLayerMixin):
    """Keys and values in memory allocated ahead, which rows are written into."""

    is_croppable = True

    def __init__(self, room=32, **kwargs):
        super().__init__()
        self.room, self.length = room, 0

    def lazy_initialization(self, key_states, value_states):
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (t.new_empty(*t.shape[:2], self.room, t.shape[3]) for t in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stop = self.length + key_states.shape[-2]
        while stop > self.keys.shape[-2]:
            self.keys, self.values = (torch.cat([t, torch.empty_like(t)], -2) for t in (self.keys, self.values))
        self.keys[:, :, self.length : stop], self.values[:, :, self.length : stop] = key_states, value_states
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def get_seq_length(self):
        return self.length

    def get_mask_sizes(self, query_length):
        return self.length + query_length, 0

    def get_max_length(self):
        return -1

    get_max_cache_shape = get_max_length

    def reset(self):
        self.length = 0

    def crop(self, tokens_to_remove):
        self.length = tokens_to_remove if tokens_to_remove > 0 else max(self.length + tokens_to_remove, 0)

    def reorder_cache(self, beam_idx):
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices):
        self.keys, self.values = self.keys[indices], self.values[indices]

    def batch_repeat_interleave(self, repeats):
        self.keys, self.values = (t.repeat_interleave(repeats, 0) for t in (self.keys, self.values))


class Slabs(Cache):
    """A cache of such layers."""

    def __init__(self):
        super().__init__(layer_class_to_replicate=Slab)


class Paged(DynamicLayer):
    """Keys and values in blocks of sixteen rows, found by a table."""

    def __init__(self, **kwargs):
        super().__init__()
        self.blocks, self.length = [], 0

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for key, value in zip(key_states.unbind(2), value_states.unbind(2), strict=True):
            if self.length == 16 * len(self.blocks):
                self.blocks.append([t.new_zeros(*t.shape[:2], 16, t.shape[2]) for t in (key, value)])
            for block, row in zip(self.blocks[self.length // 16], (key, value), strict=True):
                block[:, :, self.length % 16] = row
            self.length += 1
        return self.read()

    def read(self):
        return tuple(torch.cat([block[n] for block in self.blocks], 2)[:, :, : self.length] for n in (0, 1))

    def get_seq_length(self):
        return self.length

    def crop(self, tokens_to_remove):
        self.length = tokens_to_remove if tokens_to_remove > 0 else max(self.length + tokens_to_remove, 0)
        self.blocks = self.blocks[: -(-self.length // 16)]

    def each(self, change):
        self.blocks = [[change(tensor) for tensor in block] for block in self.blocks]

    def reorder_cache(self, beam_idx):
        self.each(lambda tensor: tensor[beam_idx])

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats):
        self.each(lambda tensor: tensor.repeat_interleave(repeats, 0))


class InPages(Cache):
    """A cache of such layers."""

    def __init__(self):
        super().__init__(layer_class_to_replicate=Paged)


# Wrong in one thing ---------------------------------------------------------------------------------------------------


class CropsTheFirstLayer(DynamicCache):
    def crop(self, n):
        self.layers[0].crop(n)


class ReordersKAlone(DynamicCache):
    def reorder_cache(self, beam_idx):
        for layer in self.layers:
            layer.keys = layer.keys[beam_idx]


class SelectForgetsALayer(DynamicCache):
    def batch_select_indices(self, indices):
        for number, layer in enumerate(self.layers):
            if number == 1:
                layer.keys, layer.values = layer.keys[: len(indices)], layer.values[: len(indices)]
            else:
                layer.batch_select_indices(indices)


class CountsOneMoreAfterCrop(DynamicCache):
    cropped = 0

    def crop(self, n):
        super().crop(n)
        self.cropped = 1

    def get_seq_length(self, layer_idx=0):
        return super().get_seq_length(layer_idx) + self.cropped


class DropsRowsInBatches(DynamicCache):
    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if len(key_states) > 2:
            key_states, value_states = key_states.clone(), value_states.clone()
            key_states[2:] = value_states[2:] = 0
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class Ring(DynamicLayer):
    """Keeps the newest 64, of a model that reads all."""

    def __init__(self, **kwargs):
        super().__init__()
        self.seen = 0

    def update(self, key_states, value_states, *args, **kwargs):
        self.seen += key_states.shape[-2]
        read = super().update(key_states, value_states, *args, **kwargs)
        self.keys, self.values = self.keys[:, :, -64:], self.values[:, :, -64:]
        return read

    def get_seq_length(self):
        return self.seen

    def get_mask_sizes(self, query_length):
        held = self.keys.shape[-2] if self.is_initialized else 0
        return held + query_length, self.seen - held


class InARing(Cache):
    def __init__(self):
        super().__init__(layer_class_to_replicate=Ring)


class Half(DynamicCache):
    """Keeps sixteen bits: it loses, by intent."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        dtype = key_states.dtype
        key_states, value_states = key_states.to(torch.float16), value_states.to(torch.float16)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys.to(dtype), values.to(dtype)


class Eighths(DynamicCache):
    """Rounds to eighths: it loses, by intent, whatever the precision."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        rounded = ((8 * t).round() / 8 for t in (key_states, value_states))
        return super().update(*rounded, layer_idx, *args, **kwargs)


class EighthsReorderingKAlone(Eighths):
    reorder_cache = ReordersKAlone.reorder_cache
