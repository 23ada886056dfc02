package flowspec

import (
	"errors"
	"sync"

	"github.com/expr-lang/expr/ast"
	"github.com/expr-lang/expr/checker"
	"github.com/expr-lang/expr/compiler"
	"github.com/expr-lang/expr/conf"
	"github.com/expr-lang/expr/file"
	"github.com/expr-lang/expr/parser"
	"github.com/expr-lang/expr/vm"

	"natsflow/flow"
)

// program is a part of an expression that runs in the virtual machine of the
// expression language.
type program struct {
	code  *vm.Program
	paths []*path
	names []string
	// machines are reused; each has the map that it finds the paths in.
	machines sync.Pool
}

type machine struct {
	vm  vm.VM
	env map[string]any
}

// virtual compiles a part of an expression for the virtual machine.
func (c *exprCompiler) virtual(n ast.Node) eval {
	p := &program{}
	p.machines.New = func() any { return &machine{env: make(map[string]any, len(p.paths))} }
	w := &rewriter{scope: c.scope, program: p, config: conf.CreateNew()}
	w.config.WithEnv(map[string]any{})
	w.config.Strict = false
	w.functions()
	tree := &parser.Tree{Node: w.rewrite(n, nil), Source: file.NewSource(c.text)}
	_, err := checker.Check(tree, w.config)
	if err == nil {
		p.code, err = compiler.Compile(tree, w.config)
	}
	if err != nil {
		c.syntaxError(err)
		return nil
	}
	return p.eval
}

func (p *program) eval(m *flow.Meta, r record) (value, error) {
	mach := p.machines.Get().(*machine)
	defer p.machines.Put(mach)
	for i, path := range p.paths {
		v, err := path.value(m, r)
		if err != nil {
			return value{}, err
		}
		mach.env[p.names[i]] = v.box()
	}
	out, err := mach.vm.Run(p.code, mach.env)
	clear(mach.env)
	if err != nil {
		var fe *file.Error
		if errors.As(err, &fe) {
			err = errors.New(fe.Message)
		}
		return value{}, err
	}
	return unbox(out)
}
