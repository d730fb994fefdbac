"""Optimised HLO as compilers write it, in short."""

LOOP = """\
HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/model.py"
2 "/usr/lib/optax/losses.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=40 end_line=40 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%body (p: (s32[], f32[4,8], f32[6,8,8])) -> (s32[], f32[4,8], f32[6,8,8]) {
  %p = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)}, f32[6,8,8]{2,1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %h = f32[4,8]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %w = f32[6,8,8]{2,1,0:T(8,128)} get-tuple-element(%p), index=2
  %wi = f32[8,8]{1,0:T(8,128)} fusion(%w, %i), kind=kLoop, calls=%slicing
  %hw = f32[4,8]{1,0:T(8,128)} dot(%h, %wi), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %r = f32[4,8]{1,0:T(8,128)} all-reduce(%hw), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%sum, metadata={op_name="jit(step)/shard_map/while/body/psum" stack_frame_id=2}
  ROOT %t = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)}, f32[6,8,8]{2,1,0:T(8,128)}) tuple(%next, %r, %w)
}

%condition (q: (s32[], f32[4,8], f32[6,8,8])) -> pred[] {
  %q = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)}, f32[6,8,8]{2,1,0:T(8,128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %limit = s32[]{:T(128)} constant(6)
  ROOT %lt = pred[]{:T(512)} compare(%j, %limit), direction=LT
}

%slicing (a: f32[6,8,8], b: s32[]) -> f32[8,8] {
  %a = f32[6,8,8]{2,1,0:T(8,128)} parameter(0)
  %b = s32[]{:T(128)} parameter(1)
  %zero.1 = s32[]{:T(128)} constant(0)
  %slice = f32[1,8,8]{2,1,0:T(8,128)} dynamic-slice(%a, %b, %zero.1, %zero.1), dynamic_slice_sizes={1,8,8}
  ROOT %bitcast = f32[8,8]{1,0:T(8,128)} bitcast(%slice)
}

ENTRY %main (x: f32[4,8], ws: f32[6,8,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0:T(8,128)} parameter(0), metadata={op_name="x"}
  %ws = f32[6,8,8]{2,1,0:T(8,128)} parameter(1), metadata={op_name="w"}
  %zero = s32[]{:T(128)} constant(0)
  %copied = s32[]{:T(128)} copy(%zero)
  %start = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)}, f32[6,8,8]{2,1,0:T(8,128)}) tuple(%copied, %x, /*index=2*/%ws)
  %loop = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)}, f32[6,8,8]{2,1,0:T(8,128)}) while(%start), condition=%condition, body=%body
  ROOT %out = f32[4,8]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""  # noqa: E501
"""Six layers in a loop, as the compiler for TPUs writes it: it does not say how often the loop runs."""

LAYOUT = """\
BufferAssignment:
allocation 0: size 4096, page 0, parameter 0, shape |f32[1024]| at ShapeIndex {}, maybe-live-out:
 value: <1 x @0> (size=4096,offset=0): f32[1024]{0:T(1024)}
allocation 1: size 8192, color 1, page 0, preallocated-temp:
 value: <2 near @1> (size=8192,offset=0): f32[2048]{0:T(1024)S(1)}
allocation 2: size 512, page 0, thread-local:
 value: <3 p @0> (size=512,offset=0): f32[]{:T(128)}
allocation 3: size 64, page 0, output shape is |(f32[16], f32[1024])|, maybe-live-out:
 value: <4 t{} @0> (size=64,offset=0): (f32[16]{0}, f32[1024]{0})
allocation 4: size 20480, page 0, preallocated-temp:
 value: <5 a @0> (size=16384,offset=0): f32[4096]{0:T(1024)}
 value: <6 b{1} @0> (size=8192,offset=4096): f32[2048]{0:T(1024)}
 value: <7 c @0> (size=4096,offset=16384): f32[1024]{0:T(1024)}
 value: <8 start{} @0> (size=512,offset=12288): (f32[1024]{0}, f32[1024]{0})
"""
